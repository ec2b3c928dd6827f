#include "kernels/cast.h"

#include <cstddef>

#include "kernels/cpu/cast.h"
#include "kernels/cpu/targets.h"
#include "proto/types/dtype.h"

namespace optstate::kernels {

void CastToFloat(DType from, const void* in, float* out, size_t numel) {
  cpu::CastToFloatOn(cpu::BestTarget(), from, in, out, numel);
}

void CastFromFloat(DType to, const float* in, void* out, size_t numel) {
  cpu::CastFromFloatOn(cpu::BestTarget(), to, in, out, numel);
}

void Accumulate(DType dtype, absl::Span<const void* const> gradients,
                bool first, DType sum_dtype, void* sum, size_t numel,
                UndoSlot* undo) {
  cpu::AccumulateOn(cpu::BestTarget(), dtype, gradients, first, sum_dtype, sum,
                    numel, undo);
}

}  // namespace optstate::kernels
