#ifndef OPTSTATE_KERNELS_CPU_TARGETS_H_
#define OPTSTATE_KERNELS_CPU_TARGETS_H_

#include <cstdint>

#include "absl/types/span.h"

namespace optstate::kernels::cpu {

// One instruction set: a single bit with Highway's value (HWY_AVX2, ...).
using Target = int64_t;

// Returns the targets of this binary that this CPU and kernel can run, best
// first. The last one is plain C++ without SIMD, so the list is never empty.
// Determined at the first call. Thread-safe.
absl::Span<const Target> SupportedTargets();

inline Target BestTarget() { return SupportedTargets().front(); }

// Returns "AVX3", "SCALAR", ...; the string lives as long as the process.
const char* TargetName(Target target);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_TARGETS_H_
