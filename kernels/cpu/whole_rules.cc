#include "kernels/cpu/whole_rules.h"

namespace optstate::kernels::cpu {

const WholeKernel* FindWholeKernel(OptimizerKind kind, Target target) {
  switch (kind) {
#define OPTSTATE_WHOLE_RULE_CASE(KIND, FUNCTION) \
  case OptimizerKind::KIND:                      \
    return &FUNCTION(target);
    OPTSTATE_WHOLE_RULES(OPTSTATE_WHOLE_RULE_CASE)
#undef OPTSTATE_WHOLE_RULE_CASE
    default:
      return nullptr;
  }
}

}  // namespace optstate::kernels::cpu
