#ifndef OPTSTATE_KERNELS_CPU_DYNAMIC_H_
#define OPTSTATE_KERNELS_CPU_DYNAMIC_H_

#include <cstddef>

#include "kernels/cpu/targets.h"

namespace optstate::kernels::cpu {

// StateToFloat and StateFromFloat of kernels/state_format.h for kDynamic8, run
// on one of SupportedTargets().
void DecodeOn(Target target, bool is_signed, const void* codes,
              const float* scale, float* values, size_t numel);
void EncodeOn(Target target, bool is_signed, const float* values, void* codes,
              float* scale, size_t numel);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_DYNAMIC_H_
