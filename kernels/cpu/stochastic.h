#ifndef OPTSTATE_KERNELS_CPU_STOCHASTIC_H_
#define OPTSTATE_KERNELS_CPU_STOCHASTIC_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/targets.h"

namespace optstate::kernels::cpu {

// Runs StateFromUpdate of kernels/state_format.h for kBFloat16, on one of
// SupportedTargets(): elements `flat` and on of the flat space, of state array
// `array`.
void RoundStochasticallyOn(Target target, uint32_t random_seed, int array,
                           uint64_t flat, const float* in, void* out,
                           size_t numel);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_STOCHASTIC_H_
