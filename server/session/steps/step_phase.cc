#include "server/session/steps/step_phase.h"

namespace optstate::session {

absl::string_view NameOf(StepPhase phase) {
  switch (phase) {
    case StepPhase::kNone:
      return "none";
    case StepPhase::kOpen:
      return "open";
    case StepPhase::kDecided:
      return "decided";
    case StepPhase::kPrepared:
      return "prepared";
    case StepPhase::kApplying:
      return "applying";
    case StepPhase::kRecorded:
      return "recorded";
  }
  return "?";
}

bool IsTransition(StepPhase from, StepPhase to) {
  switch (from) {
    case StepPhase::kNone:
      return to == StepPhase::kOpen;
    case StepPhase::kOpen:
      return to == StepPhase::kDecided || to == StepPhase::kNone;
    case StepPhase::kDecided:
      return to == StepPhase::kApplying || to == StepPhase::kRecorded ||
             to == StepPhase::kPrepared || to == StepPhase::kNone;
    case StepPhase::kPrepared:
      return to == StepPhase::kApplying || to == StepPhase::kRecorded ||
             to == StepPhase::kNone;
    case StepPhase::kApplying:
      return to == StepPhase::kRecorded || to == StepPhase::kNone;
    case StepPhase::kRecorded:
      return to == StepPhase::kNone;
  }
  return false;
}

}  // namespace optstate::session
