#ifndef OPTSTATE_PROTO_TYPES_STEP_VERDICT_H_
#define OPTSTATE_PROTO_TYPES_STEP_VERDICT_H_

#include <cstdint>

#include "absl/base/casts.h"

namespace optstate {

// A verdict says what becomes of a prepared step. Values equal those of
// v1::DecideRequest::Verdict.
enum class Verdict : uint8_t {
  kCommit = 1,
  kSkip = 2,  // take the step, but update nothing
  kAbort = 3,
  // Keep it prepared, to be taken with the norm and the clip coefficient of all
  // nodes.
  kClip = 5,  // 4 was a commit, for daemons of version 0.35
};

// The decision of all nodes about a step that they have prepared.
struct StepVerdict {
  uint64_t step = 0;
  uint64_t digest = 0;  // of what was prepared
  Verdict verdict = Verdict::kCommit;
  // With kClip alone: as StepOutcome has them, of all nodes.
  double gradient_norm = 0;
  double clip_coefficient = 1;
};

// Returns the digest of a prepared step once it is clipped by the norm of all
// nodes: another one, so that a verdict about the step before comes too late.
inline uint64_t ClippedDigest(uint64_t digest, double gradient_norm,
                              double clip_coefficient) {
  // One of them has its highest bit set, the other one not.
  return digest ^ absl::bit_cast<uint64_t>(gradient_norm) ^
         ~absl::bit_cast<uint64_t>(clip_coefficient);
}

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_STEP_VERDICT_H_
