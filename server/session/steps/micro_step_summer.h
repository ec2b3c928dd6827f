#ifndef OPTSTATE_SERVER_SESSION_STEPS_MICRO_STEP_SUMMER_H_
#define OPTSTATE_SERVER_SESSION_STEPS_MICRO_STEP_SUMMER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/staging_marks.h"
#include "server/session/steps/step_state.h"

namespace optstate::session {

// Sums the micro-steps of the ranks, in a job whose engine reduces and
// accumulates, and answers the ranks that wait in a step.
//
// Threads: not thread-safe; the job's lock guards it.
class MicroStepSummer {
 public:
  // The arguments must outlive this object.
  MicroStepSummer(JobContext* job, RankRoster* ranks, StepState* step,
                  StagingMarks* marks)
      : job_(*job), ranks_(*ranks), step_(*step), marks_(*marks) {}

  // Returns an error until a rank whose sums were dropped has aborted.
  absl::Status CheckSums(uint32_t rank) const;
  absl::Status PushTogether(uint32_t rank, uint64_t step, uint32_t micro_step,
                            uint32_t first, uint32_t end);
  // Notes that the rank is past micro-steps [0, end).
  void NotePast(uint32_t rank, int64_t end);
  // Sums all that can be summed of parameters [first, end), and answers the
  // ranks that have waited for it.
  void SumCompletedMicroSteps(uint32_t first, uint32_t end);
  // Drops the rank's part of the sums, and with it those that include it.
  void DropSums(uint32_t rank);
  // Forgets the sums of a step that is over for all ranks.
  void ForgetSums();
  // Notes that a rank that aborts because a lost rank's sums were dropped knows
  // of that loss: it is not aborted for it again when it next waits.
  void NoteDropAcknowledged(uint32_t rank);
  // Restores the sums of a former engine before the first rank is attached.
  void RestoreSums();

  // Returns whether the rank waits for an answer in the open step.
  bool IsWaiting(uint32_t rank) const;
  // Answers the rank's EndMicroStep, if it waits for one.
  void AnswerEnding(uint32_t rank, const absl::Status& status);
  // Answers all commits.
  void AnswerCommits(const absl::Status& status, const StepOutcome& outcome);

 private:
  void NotifySumsDropped(uint32_t rank, uint32_t dropped_by);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StagingMarks& marks_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_MICRO_STEP_SUMMER_H_
