#include "kernels/cpu/marked_kernels.h"

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/marked_kernels.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/rule_kernels-inl.h"
#include "kernels/rules/adam-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {

// All dtypes would take minutes to compile.
template <class Rule>
const RuleKernels& SomeKernelsOf() {
  static constexpr RuleKernels kKernels = [] {
    RuleKernels kernels;
    AddKernels<Rule, Dispatch::kFixed, DType::kFloat32, DType::kFloat32>(
        &kernels);
    AddKernels<Rule, Dispatch::kFixed, DType::kBFloat16, DType::kBFloat16>(
        &kernels);
    AddKernels<Rule, Dispatch::kFixed, DType::kBFloat16, DType::kBFloat16,
               MasterFormat::kSplit>(&kernels);
    return kernels;
  }();
  return kKernels;
}

const RuleKernels& MarkedAdamWOfTarget(uint32_t options) {
  return options == adam::kAmsgrad
             ? SomeKernelsOf<Adam<OptimizerKind::kAdamW, true>>()
             : SomeKernelsOf<Adam<OptimizerKind::kAdamW, false>>();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"

namespace optstate::kernels::cpu {

const UpdateKernel* FindMarkedKernel(const UpdateKernelKey& key,
                                     Target target) {
  static constexpr auto kAdamW = OPTSTATE_TARGET_TABLE(MarkedAdamWOfTarget);
  if (key.optimizer != OptimizerKind::kAdamW &&
      key.optimizer != OptimizerKind::kLion) {
    return nullptr;
  }
  const RuleKernels& kernels =
      key.optimizer == OptimizerKind::kAdamW
          ? kAdamW.For(target)(key.options)
          : LionKernels(key.optimizer, key.options, target);
  const UpdateKernel& kernel =
      kernels.Of(key.state, key.gradient, key.parameter, key.master);
  return kernel.apply == nullptr ? nullptr : &kernel;
}

}  // namespace optstate::kernels::cpu

#endif  // HWY_ONCE
