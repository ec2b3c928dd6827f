// The rules of Adam and AdamW.

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/adam.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/rule_kernels-inl.h"
#include "kernels/cpu/rules/adam-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {

template <OptimizerKind kKind>
const RuleKernels& AdamOfKind(uint32_t options) {
  return options == adam::kAmsgrad
             ? KernelsOf<Adam<kKind, true>, Dispatch::kFixed>()
             : KernelsOf<Adam<kKind, false>, Dispatch::kFixed>();
}

const RuleKernels& AdamOfTarget(OptimizerKind kind, uint32_t options) {
  return kind == OptimizerKind::kAdam
             ? AdamOfKind<OptimizerKind::kAdam>(options)
             : AdamOfKind<OptimizerKind::kAdamW>(options);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(AdamKernels, AdamOfTarget)
#endif  // HWY_ONCE
