#ifndef OPTSTATE_SERVER_SESSION_RANKS_LOSS_STATE_H_
#define OPTSTATE_SERVER_SESSION_RANKS_LOSS_STATE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate::session {

// The other ranks' knowledge of a rank's loss; README.md has the transitions.
enum class LossState : uint8_t {
  kNone,         // the rank is not lost
  kNotNotified,  // no rank was aborted for the loss
  kNotified,     // this engine has aborted a waiting rank for it
  // The aborted rank has made another call; or no rank was aborted, because no
  // step was open.
  kAcknowledged,
};

// Returns the name as in README.md.
absl::string_view NameOf(LossState state);
// Returns whether an engine may make this transition.
bool IsTransition(LossState from, LossState to);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_LOSS_STATE_H_
