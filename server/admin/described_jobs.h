#ifndef OPTSTATE_SERVER_ADMIN_DESCRIBED_JOBS_H_
#define OPTSTATE_SERVER_ADMIN_DESCRIBED_JOBS_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/admin/engine_channels.h"
#include "server/admin/kept_answers.h"
#include "server/admin/shared_answers.h"
#include "server/supervisor/supervisor_control.h"

namespace optstate::admin {

// Describes jobs by what the supervisor, their engines and their files say, as
// AdminService documents it, whoever may look at them: leaving private jobs out
// is the caller's (shown_jobs.h).
//
// Callers who want to know the same at the same time share a question to the
// engines: there is one at a time about all jobs, and one about each. It has
// its own time, for a caller who has little must not end it for the others. It
// may begin when another has ended; a caller who has no time for that asks
// alone.
//
// A caller who says that an engine's answer may be of some age gets one that is
// kept, if there is one: then no engine is asked (kept_answers.h). All that the
// supervisor knows of a job, who may use it among that, is of the call itself
// in either case.
//
// Threads: thread-safe. Calls block the calling thread.
class DescribedJobs {
 public:
  using Jobs = absl::StatusOr<std::vector<v1::Job>>;

  // Both outlive the object. `engine_answer_max`: how long an engine may take
  // to describe itself. `clock`: see KeptAnswers.
  DescribedJobs(supervisor::SupervisorControl* control, EngineChannels* engines,
                absl::Duration engine_answer_max,
                KeptAnswers::Clock clock = absl::Now)
      : control_(control),
        engines_(engines),
        engine_answer_max_(engine_answer_max),
        kept_(std::move(clock)) {}

  // Describes all jobs; never an error. `age_max`: the age that an engine's
  // answer may have.
  std::shared_ptr<const Jobs> All(
      absl::Time deadline, absl::Duration age_max = absl::ZeroDuration());
  // Describes one job, which the supervisor has just summed up. NOT_FOUND: it
  // has ended meanwhile.
  absl::StatusOr<v1::Job> One(const supervisor::JobSummary& summary,
                              absl::Time deadline,
                              absl::Duration age_max = absl::ZeroDuration());
  // Describes one with its memory use, which is not shared.
  absl::StatusOr<v1::Job> OneWithMemory(const std::string& name,
                                        absl::Time deadline);

  // Returns whether a caller with this deadline has time to share answers.
  bool MayShare(absl::Time deadline) const;

  // The number of callers who wait for a question about this job, or about all
  // (empty), that another asks.
  size_t CountWaiting(const std::string& job) const;

 private:
  absl::Time EngineDeadline(absl::Time deadline) const;
  std::vector<v1::Job> Describe(
      const std::vector<supervisor::JobSummary>& summaries, absl::Time deadline,
      absl::Duration age_max);
  // Returns an answer that is kept; null: there is none of such an age.
  std::shared_ptr<const v1::Job> FindKept(const supervisor::JobSummary& summary,
                                          absl::Duration age_max) const;
  // Asks a job's engine, together with others who want to know the same.
  absl::StatusOr<v1::Job> AskEngine(const supervisor::JobSummary& summary,
                                    absl::Time deadline);
  // Puts together what supervisor and engine say. NOT_FOUND: the job has ended
  // meanwhile.
  absl::StatusOr<v1::Job> Put(const supervisor::JobSummary& summary,
                              absl::StatusOr<v1::Job> answer);

  supervisor::SupervisorControl* const control_;
  EngineChannels* const engines_;
  const absl::Duration engine_answer_max_;
  SharedAnswers<Jobs> lists_;
  SharedAnswers<absl::StatusOr<v1::Job>> answers_;  // of one engine each
  KeptAnswers kept_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_DESCRIBED_JOBS_H_
