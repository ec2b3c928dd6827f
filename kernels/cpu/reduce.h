#ifndef OPTSTATE_KERNELS_CPU_REDUCE_H_
#define OPTSTATE_KERNELS_CPU_REDUCE_H_

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/cpu/targets.h"
#include "kernels/reduction.h"
#include "proto/types/dtype.h"

namespace optstate::kernels::cpu {

// Runs Reduce of kernels/reduce.h on one of SupportedTargets().
double ReduceOn(Target target, Reduction reduction, DType dtype,
                absl::Span<const void* const> gradients, size_t numel);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_REDUCE_H_
