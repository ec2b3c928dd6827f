#ifndef OPTSTATE_SERVER_ADMIN_DESCRIBED_JOBS_H_
#define OPTSTATE_SERVER_ADMIN_DESCRIBED_JOBS_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/admin/engine_channels.h"
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
// Threads: thread-safe. Calls block the calling thread.
class DescribedJobs {
 public:
  using Jobs = absl::StatusOr<std::vector<v1::Job>>;

  // Both outlive the object. `engine_answer_max`: how long an engine may take
  // to describe itself.
  DescribedJobs(supervisor::SupervisorControl* control, EngineChannels* engines,
                absl::Duration engine_answer_max)
      : control_(control),
        engines_(engines),
        engine_answer_max_(engine_answer_max) {}

  // Describes all jobs; never an error.
  std::shared_ptr<const Jobs> All(absl::Time deadline);
  // Describes one job. NOT_FOUND: there is no such job.
  std::shared_ptr<const Jobs> One(const std::string& name, absl::Time deadline);
  // Describes one with its memory use, which is not shared.
  absl::StatusOr<v1::Job> OneWithMemory(const std::string& name,
                                        absl::Time deadline);

  // Returns whether a caller with this deadline has time to share answers.
  bool MayShare(absl::Time deadline) const;

  // The number of callers who wait for a question about this job, or about all
  // (empty), that another asks.
  size_t CountWaiting(const std::string& job) const;

 private:
  std::shared_ptr<const Jobs> Share(const std::string& key, absl::Time deadline,
                                    absl::FunctionRef<Jobs(absl::Time)> ask);
  std::vector<v1::Job> Describe(
      const std::vector<supervisor::JobSummary>& summaries,
      absl::Time deadline);

  supervisor::SupervisorControl* const control_;
  EngineChannels* const engines_;
  const absl::Duration engine_answer_max_;
  SharedAnswers<Jobs> answers_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_DESCRIBED_JOBS_H_
