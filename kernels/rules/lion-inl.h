// The rule of Lion, as in lion-pytorch and in DeepSpeed's FusedLion. Per-target
// include.

#if defined(OPTSTATE_KERNELS_RULES_LION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_LION_INL_H_
#undef OPTSTATE_KERNELS_RULES_LION_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_LION_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/moments-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_LION_FACTORS_
#define OPTSTATE_KERNELS_RULES_LION_FACTORS_
namespace optstate::kernels {

enum LionFactor : int {
  kLionLr,
  // The value lr * weight_decay.
  kLionDecay,
  // The change has the sign of Keep * exp_avg + Gain * gradient: beta1 and
  // 1 - beta1.
  kLionSignKeep,
  kLionSignGain,
  // The factors of exp_avg, with beta2: see factors.h.
  kLionGain,
  kLionKeep,
  kLionLoss,
};

inline UpdateFactors PrepareLion(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  UpdateFactors factors = CommonFactors(input, h[lion::kMaximize] != 0);
  float* slot = factors.slot;
  slot[kLionLr] = RoundToFloat(h[lion::kLr]);
  slot[kLionDecay] = RoundToFloat(h[lion::kLr] * h[lion::kWeightDecay]);
  slot[kLionSignKeep] = RoundToFloat(h[lion::kBeta1]);
  slot[kLionSignGain] = RoundToFloat(1 - h[lion::kBeta1]);
  slot[kLionGain] = AverageGain(h[lion::kBeta2]);
  slot[kLionKeep] = AverageKeep(h[lion::kBeta2]);
  slot[kLionLoss] = AverageLoss(h[lion::kBeta2]);
  return factors;
}

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_LION_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// State array: exp_avg.
class Lion {
 public:
  static constexpr uint32_t kStates = 0b001;
  static constexpr uint32_t kSquares = NeverNegativeBits(lion::kArrays);
  static constexpr auto kPrepare = &PrepareLion;
  static constexpr auto kAdvance = nullptr;

  OPTSTATE_HOST_DEVICE explicit Lion(const UpdateFactors& factors)
      : lr_(factors.slot[kLionLr]),
        decay_(factors.slot[kLionDecay]),
        sign_keep_(factors.slot[kLionSignKeep]),
        sign_gain_(factors.slot[kLionSignGain]),
        gain_(factors.slot[kLionGain]),
        keep_(factors.slot[kLionKeep]),
        loss_(factors.slot[kLionLoss]) {}

  template <class D, class V>
  OPTSTATE_OP void operator()(D d, V grad, V& master, V& exp_avg, V&,
                              V&) const {
    const V direction = ops::Add(ops::Product(ops::Set(d, sign_keep_), exp_avg),
                                 ops::Product(ops::Set(d, sign_gain_), grad));
    // The sign, as in torch.sign, is 0 of 0 and of NaN.
    const V zero = ops::Zero(d);
    const V lr = ops::Set(d, lr_);
    const V up = ops::IfThenElseZero(ops::Gt(direction, zero), lr);
    const V change =
        ops::IfThenElse(ops::Lt(direction, zero), ops::Neg(lr), up);
    master = ops::CanonicalNan(
        d,
        ops::Sub(master, ops::Add(DecoupledDecay(d, master, decay_), change)));

    const V infinity = ops::Set(d, std::numeric_limits<float>::infinity());
    const V gained = ops::Product(ops::Set(d, gain_), grad);
    exp_avg = ops::CanonicalNan(
        d, NextSum(d, gained, exp_avg, ops::Eq(ops::Abs(exp_avg), infinity),
                   keep_, loss_));
  }

 private:
  const float lr_;
  const float decay_;
  const float sign_keep_;
  const float sign_gain_;
  const float gain_;
  const float keep_;
  const float loss_;
};

// See rules.h.
template <class Visit>
decltype(auto) VisitLion(OptimizerKind, uint32_t, const Visit& visit) {
  return visit.template operator()<Lion>();
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
