#ifndef OPTSTATE_SERVER_SESSION_TESTING_QUIET_RANK_H_
#define OPTSTATE_SERVER_SESSION_TESTING_QUIET_RANK_H_

#include <cstddef>
#include <vector>

#include "server/session/testing/job_harness.h"

namespace optstate::session {

// A job and its only rank. The rank's own part of a step takes neither memory
// nor a lock, so that tests can count what the job takes.
//
// Threads: one at a time.
class QuietRank final : private SessionListener {
 public:
  explicit QuietRank(const JobHarness::Setup& setup);

  // Pushes the parameters one by one, with accumulation a second micro-step
  // too, and commits.
  void Step();

  // Returns whether every step was applied.
  bool ok() const { return !failed_ && applied_ == commit_.step; }
  uint64_t steps() const { return commit_.step; }
  // Number of calls of the job in one step.
  int calls_per_step() const { return calls_per_step_; }

 private:
  void OnStepDone(uint64_t request_id, const absl::Status& status,
                  const StepOutcome& outcome) override;

  JobHarness harness_;
  const uint32_t parameters_;
  const bool accumulates_;
  const int calls_per_step_;
  std::vector<std::byte> area_;
  std::vector<Hyperparams> groups_;
  CommitSpec commit_;
  uint64_t applied_ = 0;
  bool failed_ = false;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_QUIET_RANK_H_
