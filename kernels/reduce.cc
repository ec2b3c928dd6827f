#include "kernels/reduce.h"

#include <cstddef>

#include "kernels/cpu/reduce.h"
#include "kernels/cpu/targets.h"
#include "proto/types/dtype.h"

namespace optstate::kernels {

double Reduce(Reduction reduction, DType dtype,
              absl::Span<const void* const> gradients, size_t numel) {
  return cpu::ReduceOn(cpu::BestTarget(), reduction, dtype, gradients, numel);
}

}  // namespace optstate::kernels
