#ifndef OPTSTATE_SERVER_SESSION_RANKS_LOSS_STATE_H_
#define OPTSTATE_SERVER_SESSION_RANKS_LOSS_STATE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate::session {

// What the other ranks know of a rank's loss; README.md says what leads from
// one state to another.
enum class LossState : uint8_t {
  kNone,         // the rank is not lost
  kNotNotified,  // no rank was aborted for the loss
  kNotified,     // this engine has aborted a waiting rank for it
  // That rank has made another call. Also a loss for which none is aborted,
  // because no step was open.
  kAcknowledged,
};

// Returns the name as in README.md.
absl::string_view NameOf(LossState state);
// Returns whether an engine may make this transition.
bool IsTransition(LossState from, LossState to);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_LOSS_STATE_H_
