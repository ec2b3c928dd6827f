#ifndef OPTSTATE_KERNELS_CPU_RULES_H_
#define OPTSTATE_KERNELS_CPU_RULES_H_

#include <cstdint>

#include "kernels/cpu/rule_kernels.h"
#include "kernels/cpu/targets.h"
#include "kernels/rules/rules.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cpu {

#define OPTSTATE_DECLARE_RULE(KIND, NAME)                                \
  const RuleKernels& NAME##Kernels(OptimizerKind kind, uint32_t options, \
                                   Target target);
OPTSTATE_RULES(OPTSTATE_DECLARE_RULE)
#undef OPTSTATE_DECLARE_RULE

// Returns the kernel of `key` for one of SupportedTargets(); null when there is
// none.
const UpdateKernel* FindKernel(const UpdateKernelKey& key, Target target);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_RULES_H_
