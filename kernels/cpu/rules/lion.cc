// The rule of Lion, as in lion-pytorch and in DeepSpeed's FusedLion.

#include <cstdint>
#include <limits>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/factors.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/lion.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/moments-inl.h"
#include "kernels/cpu/rule_kernels-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_RULES_LION_CC_
#define OPTSTATE_KERNELS_CPU_RULES_LION_CC_
namespace optstate::cpu {

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

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_RULES_LION_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// State array: exp_avg.
class Lion {
 public:
  static constexpr uint32_t kStates = 0b001;
  static constexpr uint32_t kSquares = 0;
  static constexpr auto kPrepare = &PrepareLion;
  static constexpr auto kAdvance = nullptr;

  explicit Lion(const UpdateFactors& factors)
      : lr_(factors.slot[kLionLr]),
        decay_(factors.slot[kLionDecay]),
        sign_keep_(factors.slot[kLionSignKeep]),
        sign_gain_(factors.slot[kLionSignGain]),
        gain_(factors.slot[kLionGain]),
        keep_(factors.slot[kLionKeep]),
        loss_(factors.slot[kLionLoss]) {}

  template <class D, class V>
  HWY_INLINE void operator()(D d, V grad, V& master, V& exp_avg, V&, V&) const {
    const V direction = hn::Add(Product(hn::Set(d, sign_keep_), exp_avg),
                                Product(hn::Set(d, sign_gain_), grad));
    // The sign, as in torch.sign, is 0 of 0 and of NaN.
    const V zero = hn::Zero(d);
    const V lr = hn::Set(d, lr_);
    const V up = hn::IfThenElseZero(hn::Gt(direction, zero), lr);
    const V change = hn::IfThenElse(hn::Lt(direction, zero), hn::Neg(lr), up);
    master = CanonicalNan(
        d, hn::Sub(master, hn::Add(DecoupledDecay(d, master, decay_), change)));

    const V infinity = hn::Set(d, std::numeric_limits<float>::infinity());
    const V gained = Product(hn::Set(d, gain_), grad);
    exp_avg = CanonicalNan(
        d, NextSum(d, gained, exp_avg, hn::Eq(hn::Abs(exp_avg), infinity),
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

const RuleKernels& LionOfTarget(OptimizerKind, uint32_t) {
  return KernelsOf<Lion>();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(LionKernels, LionOfTarget)
#endif  // HWY_ONCE
