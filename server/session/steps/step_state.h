#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_STATE_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_STATE_H_

#include "server/session/steps/micro_steps.h"
#include "server/session/steps/open_step.h"
#include "server/session/steps/step_timer.h"

namespace optstate {

// The open step of a job: what has arrived of it, and the time it takes.
//
// Threads: not thread-safe; the job's lock guards it.
struct StepState {
  OpenStep open_step;
  MicroSteps micro_steps;  // empty unless ranks accumulate together
  StepTimer timer;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_STATE_H_
