#ifndef OPTSTATE_KERNELS_CPU_CAST_H_
#define OPTSTATE_KERNELS_CPU_CAST_H_

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/cpu/targets.h"
#include "proto/types/dtype.h"

namespace optstate::kernels {
struct UndoSlot;
}  // namespace optstate::kernels

namespace optstate::kernels::cpu {

// The functions of kernels/cast.h, run on one of SupportedTargets().
void CastToFloatOn(Target target, DType from, const void* in, float* out,
                   size_t numel);
void CastFromFloatOn(Target target, DType to, const float* in, void* out,
                     size_t numel);
void AccumulateOn(Target target, DType dtype,
                  absl::Span<const void* const> gradients, bool first,
                  DType sum_dtype, void* sum, size_t numel, UndoSlot* undo);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_CAST_H_
