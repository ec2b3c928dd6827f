#include "server/session/ranks/loss_state.h"

namespace optstate::session {

absl::string_view NameOf(LossState state) {
  switch (state) {
    case LossState::kNone:
      return "none";
    case LossState::kNotNotified:
      return "not notified";
    case LossState::kNotified:
      return "notified";
    case LossState::kAcknowledged:
      return "acknowledged";
  }
  return "?";
}

bool IsTransition(LossState from, LossState to) {
  switch (from) {
    case LossState::kNone:
      return to == LossState::kNotNotified || to == LossState::kAcknowledged;
    case LossState::kNotNotified:
      return to == LossState::kNotified || to == LossState::kAcknowledged ||
             to == LossState::kNone;
    case LossState::kNotified:
      return to == LossState::kAcknowledged || to == LossState::kNotNotified ||
             to == LossState::kNone;
    case LossState::kAcknowledged:
      return to == LossState::kNotNotified || to == LossState::kNone;
  }
  return false;
}

}  // namespace optstate::session
