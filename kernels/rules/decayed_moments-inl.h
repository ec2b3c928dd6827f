// NAdam and RAdam share this: both moments, and weight decay of either kind.
// Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_DECAYED_MOMENTS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_DECAYED_MOMENTS_INL_H_
#undef OPTSTATE_KERNELS_RULES_DECAYED_MOMENTS_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_DECAYED_MOMENTS_INL_H_
#endif

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/moments-inl.h"
#include "kernels/update_kernel.h"

#ifndef OPTSTATE_KERNELS_RULES_DECAYED_MOMENTS_FACTORS_
#define OPTSTATE_KERNELS_RULES_DECAYED_MOMENTS_FACTORS_
namespace optstate::kernels {

// The first slots of both rules; their own begin at kDecayedMomentsFactors.
enum DecayedMomentsFactor : int {
  // The values weight_decay and 0, or 0 and lr * weight_decay when decoupled.
  kMomentsDecay,
  kMomentsDecoupledDecay,
  // The factors of exp_avg and of exp_avg_sq: see factors.h.
  kMomentsExpAvgWeight,
  kMomentsSquareGain,
  kMomentsSquareKeep,
  kMomentsSquareLoss,
  kDecayedMomentsFactors,
};

// The hyperparameters of which those factors are made.
struct DecayedMomentsInput {
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  bool is_decoupled;
};

inline void PrepareDecayedMoments(const DecayedMomentsInput& input,
                                  UpdateFactors* factors) {
  float* slot = factors->slot;
  const double decay = input.weight_decay;
  slot[kMomentsDecay] = RoundToFloat(input.is_decoupled ? 0 : decay);
  slot[kMomentsDecoupledDecay] =
      RoundToFloat(input.is_decoupled ? input.lr * decay : 0);
  slot[kMomentsExpAvgWeight] = AverageWeight(input.beta1);
  slot[kMomentsSquareGain] = AverageGain(input.beta2);
  slot[kMomentsSquareKeep] = AverageKeep(input.beta2);
  slot[kMomentsSquareLoss] = AverageLoss(input.beta2);
}

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_DECAYED_MOMENTS_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

class DecayedMoments {
 public:
  OPTSTATE_HOST_DEVICE explicit DecayedMoments(const UpdateFactors& factors)
      : decay_(factors.slot[kMomentsDecay]),
        decoupled_decay_(factors.slot[kMomentsDecoupledDecay]),
        exp_avg_weight_(factors.slot[kMomentsExpAvgWeight]),
        square_gain_(factors.slot[kMomentsSquareGain]),
        square_keep_(factors.slot[kMomentsSquareKeep]),
        square_loss_(factors.slot[kMomentsSquareLoss]) {}

  // Updates both moments; adds L2 decay to the gradient.
  template <class D, class V>
  OPTSTATE_OP void Update(D d, V master, V& grad, V& exp_avg,
                          V& exp_avg_sq) const {
    grad = WithL2Decay(d, grad, master, decay_);
    exp_avg =
        ops::CanonicalNan(d, NextAverage(d, grad, exp_avg, exp_avg_weight_));
    exp_avg_sq = ops::CanonicalNan(
        d, NextSquareAverage(d, grad, exp_avg_sq, square_gain_, square_keep_,
                             square_loss_));
  }

  // Returns the master after decoupled decay and the change.
  template <class D, class V>
  OPTSTATE_OP V Descended(D d, V master, V change) const {
    return ops::CanonicalNan(
        d,
        ops::Sub(master, ops::Add(DecoupledDecay(d, master, decoupled_decay_),
                                  change)));
  }

 private:
  const float decay_;
  const float decoupled_decay_;
  const float exp_avg_weight_;
  const float square_gain_;
  const float square_keep_;
  const float square_loss_;
};

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
