#ifndef OPTSTATE_KERNELS_CPU_ADAM_H_
#define OPTSTATE_KERNELS_CPU_ADAM_H_

#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"

namespace optstate::cpu {

// The kernel of `key` for one of SupportedTargets(). The values of `key` are
// enumerators (kernel_registry.cc checks them).
const UpdateKernel* AdamKernel(const UpdateKernelKey& key, Target target);

}  // namespace optstate::cpu

#endif  // OPTSTATE_KERNELS_CPU_ADAM_H_
