#ifndef OPTSTATE_CLIENT_CTL_JOB_WATCH_H_
#define OPTSTATE_CLIENT_CTL_JOB_WATCH_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// The result of a look at a job; nullopt: there is no such job.
using JobLook = std::optional<v1::Job>;

// Finds what has changed of a job from one look to the next.
//
// Threads: not thread-safe.
class JobWatch {
 public:
  // A committed step is told this long after the one before, at the earliest.
  explicit JobWatch(absl::Duration step_interval)
      : step_interval_(step_interval) {}

  // Returns a text for each change since the look before; after the first look
  // one text that says how the job is.
  std::vector<std::string> Look(const JobLook& look, absl::Time now);

 private:
  std::vector<std::string> Compare(const v1::Job& job, absl::Time now);
  std::string StepText(const v1::Job& job, absl::Time now);

  const absl::Duration step_interval_;
  bool looked_ = false;
  JobLook last_;            // as it was known last
  uint64_t told_step_ = 0;  // the last step in a text
  absl::Time step_told_at_ = absl::InfinitePast();
};

// Something that a script waits for.
struct WatchGoal {
  enum class Kind { kCommittedStep, kPhase, kDeleted };
  Kind kind = Kind::kDeleted;
  uint64_t step = 0;
  v1::JobPhase phase = v1::JOB_PHASE_UNSPECIFIED;
};

// Parses "committed_step=1000", "phase=failed" (in any case) or "deleted".
// INVALID_ARGUMENT names these.
absl::StatusOr<WatchGoal> ParseGoal(absl::string_view text);

// Returns whether the goal is reached. Errors say that it cannot be any more:
// NOT_FOUND: there is no such job; FAILED_PRECONDITION: the job is FAILED, and
// why.
absl::StatusOr<bool> IsReached(const WatchGoal& goal, const JobLook& look);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_JOB_WATCH_H_
