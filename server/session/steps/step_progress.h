#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_PROGRESS_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_PROGRESS_H_

#include <cstdint>
#include <optional>

#include "server/session/job_context.h"
#include "server/session/steps/open_step.h"
#include "server/session/steps/step_phase.h"
#include "storage/format/control_file.h"

namespace optstate::session {

// The phase of the open step. What has arrived says whether a step is open, and
// the mark in the control file that it is being applied; only what neither says
// is held here. The job must have a layout.
//
// Threads: not thread-safe; the job's lock guards it. Allocates nothing.
class StepProgress {
 public:
  // The arguments must outlive this object.
  StepProgress(JobContext* job, const OpenStep* arrived)
      : job_(*job), arrived_(*arrived) {}

  StepPhase phase() const;

  // The transitions. One that the table lacks ends the process.
  //
  // Lets the step be opened by what is noted after this call; no effect on a
  // step that is open.
  void Open();
  void Decide();
  // Marks the step as prepared, for the next engine too.
  void Prepare(uint64_t step);
  // Gives a prepared step up, whose gradients then need not be kept.
  void GiveUpPrepared();
  // Marks the step as in progress, for the next engine too.
  void Mark(uint64_t step);
  // Publishes the record of a skipped or applied step, and clears the mark.
  void Record(const storage::StepRecord& record);
  // Ends a closed step once its ranks are answered and what had arrived is
  // dropped. No effect on a step that was refused, which is over by that, and
  // on one that the store failed to apply: its mark stays, until the next
  // engine applies the step or a load replaces the state
  // (LoadRounds::Start).
  void End();

 private:
  uint64_t next_step() const { return job_.record().committed_step + 1; }
  void CheckMayBecome(StepPhase to) const;

  JobContext& job_;
  const OpenStep& arrived_;
  std::optional<StepPhase> closed_;  // kDecided or kRecorded
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_PROGRESS_H_
