#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_

#include <cstdint>
#include <vector>

#include "proto/shm/sealed_segment.h"
#include "storage/format/control_file.h"
#include "storage/format/step_intent.h"
#include "storage/state_file.h"

namespace optstate::session {

// A step that is written down but not finished: one in which a former engine
// died, or one that is prepared.
struct RecoveredStep {
  // The step is prepared, and its verdict is not known yet: none of its tiles
  // is touched.
  bool awaits_verdict = false;
  // This engine prepared it.
  bool is_ours = false;
  storage::StepRecord record = {};  // to be published
  std::vector<storage::StepIntentGroup> groups;
  std::vector<uint8_t> updated;
  std::vector<uint64_t> pushed_by;
  double gradient_limit = 0;
  // Memory of the gradients of ranks that need not be attached.
  std::vector<shm::PeerSegment> kept;
  std::vector<storage::StateFile> staged;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_
