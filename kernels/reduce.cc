#include "kernels/reduce.h"

#include <cstddef>

#include "kernels/cpu/reduce.h"
#include "kernels/cpu/targets.h"
#include "proto/types/dtype.h"

namespace optstate {

double SumOfSquares(DType dtype, const void* gradient, size_t numel) {
  return cpu::SumOfSquaresOn(cpu::BestTarget(), dtype, gradient, numel);
}

}  // namespace optstate
