#ifndef OPTSTATE_KERNELS_CPU_MEMORY_ROOF_H_
#define OPTSTATE_KERNELS_CPU_MEMORY_ROOF_H_

#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

namespace optstate::kernels::cpu {

// Measures the memory limit that Adam is compared with: on the best target,
// makes the loads and stores of Adam without amsgrad, gradient and parameter
// both of `dtype`, and nothing but additions between them. Leaves the state as
// it is.
void MemoryRoof(DType dtype, const TileView& view);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_MEMORY_ROOF_H_
