#ifndef OPTSTATE_KERNELS_CPU_RULES_H_
#define OPTSTATE_KERNELS_CPU_RULES_H_

#include <cstdint>

#include "kernels/cpu/rule_kernels.h"
#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

// The optimizers whose update of an element needs nothing but that element: for
// each, its kind and the function that its file in rules/ exports.
#define OPTSTATE_RULES(RULE)     \
  RULE(kAdam, AdamKernels)       \
  RULE(kAdamW, AdamKernels)      \
  RULE(kSgd, SgdKernels)         \
  RULE(kAdagrad, AdagradKernels) \
  RULE(kRmsprop, RmspropKernels) \
  RULE(kLion, LionKernels)       \
  RULE(kNadam, NadamKernels)     \
  RULE(kRadam, RadamKernels)

namespace optstate::cpu {

#define OPTSTATE_DECLARE_RULE(KIND, FUNCTION)                       \
  const RuleKernels& FUNCTION(OptimizerKind kind, uint32_t options, \
                              Target target);
OPTSTATE_RULES(OPTSTATE_DECLARE_RULE)
#undef OPTSTATE_DECLARE_RULE

// Returns the kernel of `key` for one of SupportedTargets(); null when there is
// none.
const UpdateKernel* FindKernel(const UpdateKernelKey& key, Target target);

// Bit k says that state array k of the optimizer is never negative; 0 without
// kernels.
uint32_t SquaresOf(OptimizerKind kind);

}  // namespace optstate::cpu

#endif  // OPTSTATE_KERNELS_CPU_RULES_H_
