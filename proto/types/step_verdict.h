#ifndef OPTSTATE_PROTO_TYPES_STEP_VERDICT_H_
#define OPTSTATE_PROTO_TYPES_STEP_VERDICT_H_

#include <cstdint>

namespace optstate {

// A verdict says what becomes of a prepared step. Values equal those of
// v1::DecideRequest::Verdict.
enum class Verdict : uint8_t {
  kCommit = 1,
  kSkip = 2,  // take the step, but update nothing
  kAbort = 3,
  // Take the step with the norm and the clip coefficient of all nodes.
  kCommitClipped = 4,
};

// The decision of all nodes about a step that they have prepared.
struct StepVerdict {
  uint64_t step = 0;
  uint64_t digest = 0;  // of what was prepared
  Verdict verdict = Verdict::kCommit;
  // With kCommitClipped alone: as StepOutcome has them, of all nodes.
  double gradient_norm = 0;
  double clip_coefficient = 1;
};

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_STEP_VERDICT_H_
