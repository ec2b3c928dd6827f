#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_

#include <cstdint>
#include <vector>

#include "proto/shm/sealed_segment.h"
#include "storage/format/control_file.h"
#include "storage/format/step_intent.h"
#include "storage/state_file.h"

namespace optstate {

// A step in which a former engine died and that is not finished yet.
struct RecoveredStep {
  StepRecord record;  // to be published
  std::vector<StepIntentGroup> groups;
  std::vector<uint8_t> updated;
  std::vector<uint64_t> pushed_by;
  double gradient_limit;
  // Memory of the gradients of ranks that need not be attached.
  std::vector<shm::PeerSegment> kept;
  std::vector<StateFile> staged;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_
