#ifndef OPTSTATE_KERNELS_CPU_MARKED_KERNELS_H_
#define OPTSTATE_KERNELS_CPU_MARKED_KERNELS_H_

#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"

namespace optstate::kernels::cpu {

// Returns, for tests, one of some kernels compiled with OPTSTATE_FENCE_MARKERS,
// which may not be linked together with the others. They are enough for every
// way through an update: AdamW with amsgrad and without, float32 to float32 and
// bfloat16 to bfloat16, split masters too; and Lion, each with every state
// format. Null: not one of them.
const UpdateKernel* FindMarkedKernel(const UpdateKernelKey& key, Target target);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_MARKED_KERNELS_H_
