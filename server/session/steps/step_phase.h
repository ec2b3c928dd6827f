#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_PHASE_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_PHASE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate::session {

// The phase of a job's open step; README.md says what leads from one to
// another.
enum class StepPhase : uint8_t {
  kNone,      // nothing has arrived
  kOpen,      // gradients or commits have
  kDecided,   // all ranks have committed; it is known what the step does
  kPrepared,  // that is written down, and all nodes' verdict is awaited
  kApplying,  // the control file names it, until it is recorded
  kRecorded,  // the ranks have no answer yet
};

// Returns the name as in README.md.
absl::string_view NameOf(StepPhase phase);
// Returns whether an engine may make this transition.
bool IsTransition(StepPhase from, StepPhase to);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_PHASE_H_
