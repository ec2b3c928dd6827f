// The rule of torch.optim.RMSprop.

#include <cstdint>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/factors.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/rmsprop.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/moments-inl.h"
#include "kernels/cpu/rule_kernels-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_RULES_RMSPROP_CC_
#define OPTSTATE_KERNELS_CPU_RULES_RMSPROP_CC_
namespace optstate::cpu {

enum RmspropFactor : int {
  kRmspropLr,
  kRmspropDecay,
  kRmspropEps,
  // If 0, momentum_buffer is left alone.
  kRmspropMomentum,
  // The factors of square_avg and of grad_avg: see factors.h.
  kRmspropSquareGain,
  kRmspropSquareKeep,
  kRmspropSquareLoss,
  kRmspropGradAvgWeight,
};

inline UpdateFactors PrepareRmsprop(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  const double alpha = h[rmsprop::kAlpha];
  UpdateFactors factors = CommonFactors(input, h[rmsprop::kMaximize] != 0);
  float* slot = factors.slot;
  slot[kRmspropLr] = RoundToFloat(h[rmsprop::kLr]);
  slot[kRmspropDecay] = RoundToFloat(h[rmsprop::kWeightDecay]);
  slot[kRmspropEps] = RoundToFloatNotZero(h[rmsprop::kEps]);
  slot[kRmspropMomentum] = RoundToFloatNotZero(h[rmsprop::kMomentum]);
  slot[kRmspropSquareGain] = AverageGain(alpha);
  slot[kRmspropSquareKeep] = AverageKeep(alpha);
  slot[kRmspropSquareLoss] = AverageLoss(alpha);
  // The weight has the rounding of the squares' gain, as in torch: centered,
  // the two cancel.
  slot[kRmspropGradAvgWeight] = AverageWeight(1 - slot[kRmspropSquareGain]);
  return factors;
}

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_RULES_RMSPROP_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// State arrays: square_avg; with momentum momentum_buffer; centered: grad_avg.
template <bool kMomentum, bool kCentered>
class Rmsprop {
 public:
  static constexpr uint32_t kStates =
      0b001 | (kMomentum ? 0b010 : 0) | (kCentered ? 0b100 : 0);
  static constexpr uint32_t kSquares = 0b001;
  static constexpr auto kPrepare = &PrepareRmsprop;
  static constexpr auto kAdvance = nullptr;

  explicit Rmsprop(const UpdateFactors& factors)
      : lr_(factors.slot[kRmspropLr]),
        decay_(factors.slot[kRmspropDecay]),
        eps_(factors.slot[kRmspropEps]),
        momentum_(factors.slot[kRmspropMomentum]),
        square_gain_(factors.slot[kRmspropSquareGain]),
        square_keep_(factors.slot[kRmspropSquareKeep]),
        square_loss_(factors.slot[kRmspropSquareLoss]),
        grad_avg_weight_(factors.slot[kRmspropGradAvgWeight]) {}

  template <class D, class V>
  HWY_INLINE void operator()(D d, V grad, V& master, V& square_avg, V& buffer,
                             V& grad_avg) const {
    const V lr = hn::Set(d, lr_);
    grad = WithL2Decay(d, grad, master, decay_);
    square_avg =
        CanonicalNan(d, NextSquareAverage(d, grad, square_avg, square_gain_,
                                          square_keep_, square_loss_));
    V square = square_avg;
    if constexpr (kCentered) {
      grad_avg =
          CanonicalNan(d, NextAverage(d, grad, grad_avg, grad_avg_weight_));
      square = Variance(d, square_avg, grad_avg);
    }
    const V denom = hn::Add(hn::Sqrt(square), hn::Set(d, eps_));
    V change = hn::Div(hn::Mul(lr, grad), denom);
    if constexpr (kMomentum) {
      const V momentum = hn::Set(d, momentum_);
      const V next = hn::Add(Product(momentum, buffer), hn::Div(grad, denom));
      const auto is_on = hn::Gt(momentum, hn::Zero(d));
      buffer = CanonicalNan(d, hn::IfThenElse(is_on, next, buffer));
      change = hn::IfThenElse(is_on, Product(lr, next), change);
    }
    master = CanonicalNan(d, hn::Sub(master, change));
  }

 private:
  // The variance is below 0 by rounding alone: that is 0, where torch makes
  // NaN.
  template <class D, class V>
  static HWY_INLINE V Variance(D d, V square_avg, V grad_avg) {
    const V variance = hn::Sub(square_avg, Product(grad_avg, grad_avg));
    return hn::IfThenZeroElse(hn::Lt(variance, hn::Zero(d)), variance);
  }

  const float lr_;
  const float decay_;
  const float eps_;
  const float momentum_;
  const float square_gain_;
  const float square_keep_;
  const float square_loss_;
  const float grad_avg_weight_;
};

const RuleKernels& RmspropOfTarget(OptimizerKind, uint32_t options) {
  switch (options) {
    case rmsprop::kHasMomentum | rmsprop::kCentered:
      return KernelsOf<Rmsprop<true, true>>();
    case rmsprop::kHasMomentum:
      return KernelsOf<Rmsprop<true, false>>();
    case rmsprop::kCentered:
      return KernelsOf<Rmsprop<false, true>>();
    default:
      return KernelsOf<Rmsprop<false, false>>();
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(RmspropKernels, RmspropOfTarget)
#endif  // HWY_ONCE
