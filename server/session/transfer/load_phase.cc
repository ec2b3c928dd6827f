#include "server/session/transfer/load_phase.h"

namespace optstate::session {

absl::string_view NameOf(LoadPhase phase) {
  switch (phase) {
    case LoadPhase::kOut:
      return "out";
    case LoadPhase::kBegun:
      return "begun";
    case LoadPhase::kLoading:
      return "loading";
    case LoadPhase::kFinished:
      return "finished";
  }
  return "?";
}

bool IsTransition(LoadPhase from, LoadPhase to) {
  switch (from) {
    case LoadPhase::kOut:
      return to == LoadPhase::kBegun;
    case LoadPhase::kBegun:
      return to == LoadPhase::kLoading || to == LoadPhase::kFinished ||
             to == LoadPhase::kOut;
    case LoadPhase::kLoading:
      return to == LoadPhase::kFinished || to == LoadPhase::kOut;
    case LoadPhase::kFinished:
      return to == LoadPhase::kOut;
  }
  return false;
}

}  // namespace optstate::session
