#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_PHASE_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_PHASE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate::session {

// The phase of a rank in a load round; README.md has the transitions.
enum class LoadPhase : uint8_t {
  kOut,       // the rank does not take part
  kBegun,     // it has begun, and loaded nothing
  kLoading,   // it has loaded something
  kFinished,  // it waits until all ranks have finished
};

// Returns the name as in README.md.
absl::string_view NameOf(LoadPhase phase);
// Returns whether an engine may make this transition.
bool IsTransition(LoadPhase from, LoadPhase to);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_PHASE_H_
