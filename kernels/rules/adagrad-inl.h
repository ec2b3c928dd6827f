// The rule of torch.optim.Adagrad. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_ADAGRAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_ADAGRAD_INL_H_
#undef OPTSTATE_KERNELS_RULES_ADAGRAD_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_ADAGRAD_INL_H_
#endif

#include <cstdint>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/moments-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_ADAGRAD_FACTORS_
#define OPTSTATE_KERNELS_RULES_ADAGRAD_FACTORS_
namespace optstate::kernels {

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

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_ADAGRAD_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// State array: sum.
class Adagrad {
 public:
  static constexpr uint32_t kStates = 0b001;
  static constexpr uint32_t kSquares = NeverNegativeBits(adagrad::kArrays);
  static constexpr auto kPrepare = &PrepareAdagrad;
  static constexpr auto kAdvance = nullptr;

  OPTSTATE_HOST_DEVICE explicit Adagrad(const UpdateFactors& factors)
      : decay_(factors.slot[kAdagradDecay]),
        eps_(factors.slot[kAdagradEps]),
        step_size_(factors.slot[kAdagradStepSize]),
        start_(factors.slot[kAdagradStart]) {}

  template <class D, class V>
  OPTSTATE_OP void operator()(D d, V grad, V& master, V& sum, V&, V&) const {
    grad = WithL2Decay(d, grad, master, decay_);
    const V before = ops::Add(sum, ops::Set(d, start_));
    sum = ops::CanonicalNan(d, ops::Add(before, ops::Product(grad, grad)));
    const V denom = ops::Add(ops::Sqrt(sum), ops::Set(d, eps_));
    const V change = ops::Div(ops::Mul(ops::Set(d, step_size_), grad), denom);
    master = ops::CanonicalNan(d, ops::Sub(master, change));
  }

 private:
  const float decay_;
  const float eps_;
  const float step_size_;
  const float start_;
};

// See rules.h.
template <class Visit>
decltype(auto) VisitAdagrad(OptimizerKind, uint32_t, const Visit& visit) {
  return visit.template operator()<Adagrad>();
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
