#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_

#include <cstdint>
#include <vector>

#include "proto/shm/sealed_segment.h"
#include "storage/format/control_file.h"
#include "storage/format/step_intent.h"
#include "storage/state_file.h"

namespace optstate::session {

// A step in which a former engine died and that is not finished yet.
struct RecoveredStep {
  storage::StepRecord record;  // to be published
  std::vector<storage::StepIntentGroup> groups;
  std::vector<uint8_t> updated;
  std::vector<uint64_t> pushed_by;
  double gradient_limit;
  // Memory of the gradients of ranks that need not be attached.
  std::vector<shm::PeerSegment> kept;
  std::vector<storage::StateFile> staged;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_
