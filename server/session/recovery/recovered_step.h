#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_

#include <cstdint>
#include <vector>

#include "proto/shm/sealed_segment.h"
#include "proto/types/step_verdict.h"
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
  // This node's own norms clip its gradients.
  bool is_clipped_here = false;
  // It is committed only once the norm of all nodes is noted.
  bool awaits_norm = false;
  // The norm of all nodes clips them.
  bool is_clipped_together = false;
  storage::StepRecord record = {};  // to be published
  std::vector<storage::StepIntentGroup> groups;
  std::vector<uint8_t> updated;
  std::vector<uint64_t> pushed_by;
  double gradient_limit = 0;
  // Memory of the gradients of ranks that need not be attached.
  std::vector<shm::PeerSegment> kept;
  std::vector<storage::StateFile> staged;

  // Takes the record of the intent.
  void TakeRecord(const storage::StepRecord& from) {
    record = from;
    is_clipped_here = (record.flags & storage::kStepRecordClipped) != 0;
    awaits_norm = (record.flags & storage::kStepRecordAwaitsNorm) != 0;
    record.flags &=
        ~(storage::kStepRecordClipped | storage::kStepRecordAwaitsNorm);
    is_clipped_together = false;
  }
  // Replaces this node's norm and clip coefficient, which is 1, by those of all
  // nodes. Once for a step.
  void Clip(double gradient_norm, double clip_coefficient) {
    is_clipped_together = true;
    record.prepared_digest =
        ClippedDigest(record.prepared_digest, gradient_norm, clip_coefficient);
    record.gradient_norm = gradient_norm;
    record.clip_coefficient = clip_coefficient;
    for (storage::StepIntentGroup& group : groups) {
      group.gradient_factor *= clip_coefficient;
    }
  }
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_STEP_H_
