#ifndef OPTSTATE_KERNELS_CPU_REDUCE_H_
#define OPTSTATE_KERNELS_CPU_REDUCE_H_

#include <cstddef>

#include "kernels/cpu/targets.h"
#include "proto/types/dtype.h"

namespace optstate::cpu {

// SumOfSquares of kernels/reduce.h on one of SupportedTargets().
double SumOfSquaresOn(Target target, DType dtype, const void* gradient,
                      size_t numel);

}  // namespace optstate::cpu

#endif  // OPTSTATE_KERNELS_CPU_REDUCE_H_
