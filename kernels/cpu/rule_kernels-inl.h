// The kernels of a rule, made from it. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_RULE_KERNELS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_RULE_KERNELS_INL_H_
#undef OPTSTATE_KERNELS_CPU_RULE_KERNELS_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_RULE_KERNELS_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/cpu/update-inl.h"
#include "kernels/cpu/update_blocks-inl.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {

// Says whether the dtypes are known to the loops of a rule with float state, or
// asked for at each vector.
enum class Dispatch { kFixed, kAny };

template <class Rule, Dispatch kDispatch, DType kGradient, DType kParameter,
          MasterFormat kMaster = MasterFormat::kFloat32>
constexpr void AddKernels(RuleKernels* kernels) {
  const auto add = [&](StateFormat state, auto apply, bool keeps_xor = false) {
    kernels->Of(state, kGradient, kParameter, kMaster) = {
        Rule::kPrepare, Rule::kAdvance, apply, keeps_xor};
  };
  if constexpr (kDispatch == Dispatch::kFixed) {
    using Arrays = FixedArrays<kGradient, kParameter, kMaster>;
    add(StateFormat::kFloat32,
        &UpdateFixed<Rule, kGradient, kParameter, kMaster>,
        KeepOf<Rule, Arrays>() == Keep::kXor);
    add(StateFormat::kDynamic8,
        &UpdateFixedDynamic<Rule, kGradient, kParameter, kMaster>);
  } else {
    add(StateFormat::kFloat32, &UpdateAny<Rule, kGradient, kParameter, kMaster,
                                          StateFormat::kFloat32>);
    add(StateFormat::kDynamic8,
        &UpdateDynamic<Rule, kGradient, kParameter, kMaster>);
  }
  add(StateFormat::kBFloat16,
      &UpdateAny<Rule, kGradient, kParameter, kMaster, StateFormat::kBFloat16>);
}

template <class Rule, Dispatch kDispatch, DType kGradient>
constexpr void AddKernelsOfGradient(RuleKernels* kernels) {
  AddKernels<Rule, kDispatch, kGradient, DType::kFloat32>(kernels);
  AddKernels<Rule, kDispatch, kGradient, DType::kBFloat16>(kernels);
  AddKernels<Rule, kDispatch, kGradient, DType::kFloat16>(kernels);
  AddKernels<Rule, kDispatch, kGradient, DType::kBFloat16,
             MasterFormat::kSplit>(kernels);
}

template <class Rule, Dispatch kDispatch>
constexpr RuleKernels MakeKernels() {
  RuleKernels kernels;
  AddKernelsOfGradient<Rule, kDispatch, DType::kFloat32>(&kernels);
  AddKernelsOfGradient<Rule, kDispatch, DType::kBFloat16>(&kernels);
  AddKernelsOfGradient<Rule, kDispatch, DType::kFloat16>(&kernels);
  return kernels;
}

template <class Rule, Dispatch kDispatch>
const RuleKernels& KernelsOf() {
  static constexpr RuleKernels kKernels = MakeKernels<Rule, kDispatch>();
  return kKernels;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

// OPTSTATE_DEFINE_RULE defines, once per target, the kernels of the rule NAME
// (rules/rules.h); OPTSTATE_EXPORT_RULE, in its HWY_ONCE section, the function
// of rules.h that asks each target's.
#ifndef OPTSTATE_DEFINE_RULE
#define OPTSTATE_DEFINE_RULE(NAME, DISPATCH)                                   \
  namespace optstate::kernels::cpu::HWY_NAMESPACE {                            \
  const RuleKernels& NAME##OfTarget(OptimizerKind kind, uint32_t options) {    \
    return Visit##NAME(kind, options, []<class Rule>() -> const RuleKernels& { \
      return KernelsOf<Rule, DISPATCH>();                                      \
    });                                                                        \
  }                                                                            \
  }

#define OPTSTATE_EXPORT_RULE(NAME)                                           \
  namespace optstate::kernels::cpu {                                         \
  const RuleKernels& NAME##Kernels(OptimizerKind kind, uint32_t options,     \
                                   Target target) {                          \
    static constexpr auto kOfTarget = OPTSTATE_TARGET_TABLE(NAME##OfTarget); \
    return kOfTarget.For(target)(kind, options);                             \
  }                                                                          \
  }
#endif

#endif  // per-target include guard
