#ifndef OPTSTATE_KERNELS_CPU_WHOLE_RULES_H_
#define OPTSTATE_KERNELS_CPU_WHOLE_RULES_H_

#include "kernels/cpu/targets.h"
#include "kernels/whole_kernel.h"
#include "proto/types/optimizer.h"

// The optimizers whose update of an element needs the whole parameter: for
// each, its kind and the function that its file in whole/ exports.
#define OPTSTATE_WHOLE_RULES(RULE)  \
  RULE(kLamb, LambKernel)           \
  RULE(kAdafactor, AdafactorKernel) \
  RULE(kMuon, MuonKernel)

namespace optstate::kernels::cpu {

#define OPTSTATE_DECLARE_WHOLE_RULE(KIND, FUNCTION) \
  const WholeKernel& FUNCTION(Target target);
OPTSTATE_WHOLE_RULES(OPTSTATE_DECLARE_WHOLE_RULE)
#undef OPTSTATE_DECLARE_WHOLE_RULE

// Returns the kernel for one of SupportedTargets(); null when the optimizer has
// none.
const WholeKernel* FindWholeKernel(OptimizerKind kind, Target target);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_WHOLE_RULES_H_
