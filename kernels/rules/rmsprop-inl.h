// The rule of torch.optim.RMSprop. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_RMSPROP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_RMSPROP_INL_H_
#undef OPTSTATE_KERNELS_RULES_RMSPROP_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_RMSPROP_INL_H_
#endif

#include <cstdint>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/moments-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_RMSPROP_FACTORS_
#define OPTSTATE_KERNELS_RULES_RMSPROP_FACTORS_
namespace optstate::kernels {

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

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_RMSPROP_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// State arrays: square_avg; with momentum momentum_buffer; centered: grad_avg.
template <bool kMomentum, bool kCentered>
class Rmsprop {
 public:
  static constexpr uint32_t kStates =
      0b001 | (kMomentum ? 0b010 : 0) | (kCentered ? 0b100 : 0);
  static constexpr uint32_t kSquares = NeverNegativeBits(rmsprop::kArrays);
  static constexpr auto kPrepare = &PrepareRmsprop;
  static constexpr auto kAdvance = nullptr;

  OPTSTATE_HOST_DEVICE explicit Rmsprop(const UpdateFactors& factors)
      : lr_(factors.slot[kRmspropLr]),
        decay_(factors.slot[kRmspropDecay]),
        eps_(factors.slot[kRmspropEps]),
        momentum_(factors.slot[kRmspropMomentum]),
        square_gain_(factors.slot[kRmspropSquareGain]),
        square_keep_(factors.slot[kRmspropSquareKeep]),
        square_loss_(factors.slot[kRmspropSquareLoss]),
        grad_avg_weight_(factors.slot[kRmspropGradAvgWeight]) {}

  template <class D, class V>
  OPTSTATE_OP void operator()(D d, V grad, V& master, V& square_avg, V& buffer,
                              V& grad_avg) const {
    const V lr = ops::Set(d, lr_);
    grad = WithL2Decay(d, grad, master, decay_);
    square_avg = ops::CanonicalNan(
        d, NextSquareAverage(d, grad, square_avg, square_gain_, square_keep_,
                             square_loss_));
    V square = square_avg;
    if constexpr (kCentered) {
      grad_avg = ops::CanonicalNan(
          d, NextAverage(d, grad, grad_avg, grad_avg_weight_));
      square = Variance(d, square_avg, grad_avg);
    }
    const V denom = ops::Add(ops::Sqrt(square), ops::Set(d, eps_));
    V change = ops::Div(ops::Mul(lr, grad), denom);
    if constexpr (kMomentum) {
      const V momentum = ops::Set(d, momentum_);
      const V next =
          ops::Add(ops::Product(momentum, buffer), ops::Div(grad, denom));
      const auto is_on = ops::Gt(momentum, ops::Zero(d));
      buffer = ops::CanonicalNan(d, ops::IfThenElse(is_on, next, buffer));
      change = ops::IfThenElse(is_on, ops::Product(lr, next), change);
    }
    master = ops::CanonicalNan(d, ops::Sub(master, change));
  }

 private:
  // The variance is below 0 by rounding alone: that is 0, where torch makes
  // NaN.
  template <class D, class V>
  static OPTSTATE_OP V Variance(D d, V square_avg, V grad_avg) {
    const V variance = ops::Sub(square_avg, ops::Product(grad_avg, grad_avg));
    return ops::IfThenZeroElse(ops::Lt(variance, ops::Zero(d)), variance);
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

// See rules.h.
template <class Visit>
decltype(auto) VisitRmsprop(OptimizerKind, uint32_t options,
                            const Visit& visit) {
  switch (options) {
    case rmsprop::kHasMomentum | rmsprop::kCentered:
      return visit.template operator()<Rmsprop<true, true>>();
    case rmsprop::kHasMomentum:
      return visit.template operator()<Rmsprop<true, false>>();
    case rmsprop::kCentered:
      return visit.template operator()<Rmsprop<false, true>>();
    default:
      return visit.template operator()<Rmsprop<false, false>>();
  }
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
