#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_STATE_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_STATE_H_

#include "server/session/job_context.h"
#include "server/session/steps/micro_steps.h"
#include "server/session/steps/open_step.h"
#include "server/session/steps/step_progress.h"
#include "server/session/steps/step_timer.h"

namespace optstate::session {

// The open step of a job: what has arrived of it, its phase, and the time it
// takes.
//
// Threads: not thread-safe; the job's lock guards it.
struct StepState {
  // `job` must outlive this object.
  explicit StepState(JobContext* job)
      : progress(job, &open_step), timer(&job->trace, &job->step_spans) {}
  StepState(const StepState&) = delete;
  StepState& operator=(const StepState&) = delete;

  OpenStep open_step;
  MicroSteps micro_steps;  // empty unless ranks accumulate together
  StepProgress progress;
  StepTimer timer;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_STATE_H_
