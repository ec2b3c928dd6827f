#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_PREPARER_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_PREPARER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/recovery/job_recovery.h"
#include "server/session/steps/step_committer.h"
#include "server/session/steps/step_decider.h"
#include "server/session/steps/step_state.h"

namespace optstate::session {

// Prepares a step that all nodes of a job are to take or none, and does with it
// what they decided; see "Steps of several nodes" in README.md.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while the
// state is written.
class StepPreparer {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    StepDecider* decider;
    StepCommitter* committer;
    JobRecovery* recovery;
  };
  explicit StepPreparer(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        decider_(*rooms.decider),
        committer_(*rooms.committer),
        recovery_(*rooms.recovery) {}

  // UNIMPLEMENTED: steps of such a job cannot be prepared.
  absl::Status CheckCanPrepare() const;
  // Writes a decided step down, and keeps it until its verdict. The decider has
  // its norms.
  void Prepare(const StepDecision& decision, absl::Span<const uint8_t> updated);
  // Returns what the prepared step will do.
  StepOutcome PreparedOutcome() const;
  // Carries out the verdict for an attached rank, which is answered, when the
  // step is taken, as all are that wait for it.
  void Decide(uint32_t rank, uint64_t request_id, const StepVerdict& verdict);
  // Does the same for a session that is not attached.
  absl::StatusOr<StepOutcome> DecideUnattached(const StepVerdict& verdict);
  absl::StatusOr<JobPosition> Position() const;

 private:
  // CheckVerdict returns what is still to be done.
  enum class Due {
    kNothing,  // what it says was done before
    kDecide,
    kFinish,  // decided so before, and not finished yet
  };
  absl::StatusOr<Due> CheckVerdict(const StepVerdict& verdict) const;
  absl::Status CheckIsDecidedSo(const StepVerdict& verdict,
                                const storage::StepRecord& record) const;
  absl::Status CheckCanClip(const RecoveredStep& prepared) const;
  absl::Status CheckCanCommit(const RecoveredStep& prepared) const;
  // Makes the verdict that of the step, for the next engine too.
  void Take(const StepVerdict& verdict);
  // Returns the answer to a verdict with which nothing is to be waited for.
  StepOutcome OutcomeAfter(const StepVerdict& verdict) const;

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StepDecider& decider_;
  StepCommitter& committer_;
  JobRecovery& recovery_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_PREPARER_H_
