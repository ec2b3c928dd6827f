// The rule of torch.optim.Adagrad.

#include <cstdint>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/factors.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/adagrad.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/moments-inl.h"
#include "kernels/cpu/rule_kernels-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_RULES_ADAGRAD_CC_
#define OPTSTATE_KERNELS_CPU_RULES_ADAGRAD_CC_
namespace optstate::cpu {

enum AdagradFactor : int {
  kAdagradDecay,
  kAdagradEps,
  // The value lr / (1 + (t - 1) * lr_decay).
  kAdagradStepSize,
  // The value added to `sum` before anything else: arrays begin as zeros, so at
  // the first step initial_accumulator_value, and 0 from then on.
  kAdagradStart,
};

inline UpdateFactors PrepareAdagrad(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  const double steps_before = static_cast<double>(input.step_count - 1);
  UpdateFactors factors = CommonFactors(input, h[adagrad::kMaximize] != 0);
  float* slot = factors.slot;
  slot[kAdagradDecay] = RoundToFloat(h[adagrad::kWeightDecay]);
  slot[kAdagradEps] = RoundToFloatNotZero(h[adagrad::kEps]);
  slot[kAdagradStepSize] =
      RoundToFloat(h[adagrad::kLr] / (1 + steps_before * h[adagrad::kLrDecay]));
  slot[kAdagradStart] = input.step_count == 1
                            ? RoundToFloat(h[adagrad::kInitialAccumulatorValue])
                            : 0;
  return factors;
}

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_RULES_ADAGRAD_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// State array: sum.
class Adagrad {
 public:
  static constexpr uint32_t kStates = 0b001;
  static constexpr uint32_t kSquares = 0b001;
  static constexpr auto kPrepare = &PrepareAdagrad;
  static constexpr auto kAdvance = nullptr;

  explicit Adagrad(const UpdateFactors& factors)
      : decay_(factors.slot[kAdagradDecay]),
        eps_(factors.slot[kAdagradEps]),
        step_size_(factors.slot[kAdagradStepSize]),
        start_(factors.slot[kAdagradStart]) {}

  template <class D, class V>
  HWY_INLINE void operator()(D d, V grad, V& master, V& sum, V&, V&) const {
    grad = WithL2Decay(d, grad, master, decay_);
    const V before = hn::Add(sum, hn::Set(d, start_));
    sum = CanonicalNan(d, hn::Add(before, Product(grad, grad)));
    const V denom = hn::Add(hn::Sqrt(sum), hn::Set(d, eps_));
    const V change = hn::Div(hn::Mul(hn::Set(d, step_size_), grad), denom);
    master = CanonicalNan(d, hn::Sub(master, change));
  }

 private:
  const float decay_;
  const float eps_;
  const float step_size_;
  const float start_;
};

const RuleKernels& AdagradOfTarget(OptimizerKind, uint32_t) {
  return KernelsOf<Adagrad>();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(AdagradKernels, AdagradOfTarget)
#endif  // HWY_ONCE
