#ifndef OPTSTATE_SERVER_SESSION_STEPS_STAGING_MARKS_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STAGING_MARKS_H_

#include <cstdint>

#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/step_state.h"

namespace optstate::session {

// The marks that say which of the ranks' staged gradients count, for this
// engine and the next one; see RankMark.
//
// Threads: not thread-safe; the job's lock guards it.
class StagingMarks {
 public:
  // The arguments must outlive this object.
  StagingMarks(JobContext* job, RankRoster* ranks, StepState* step)
      : job_(*job), ranks_(*ranks), step_(*step) {}

  // Returns the mark for the rank's runs at this micro-step.
  uint64_t BeginStaging(uint32_t rank, uint64_t step, uint32_t micro_step);
  // Invalidates all marks of the rank's runs.
  void RenewEpoch(uint32_t rank);

 private:
  void CarryEnded(uint32_t epoch);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STAGING_MARKS_H_
