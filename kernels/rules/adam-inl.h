// The arithmetic of Adam and AdamW; kernels/README.md derives it. Per-target
// include.

#if defined(OPTSTATE_KERNELS_RULES_ADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_ADAM_INL_H_
#undef OPTSTATE_KERNELS_RULES_ADAM_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_ADAM_INL_H_
#endif

#include <cstdint>

#include "kernels/ops/ops-inl.h"
#include "kernels/rules/adam_factors.h"
#include "kernels/rules/moments-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// State arrays: exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
template <OptimizerKind kKind, bool kAmsgrad>
class Adam {
 public:
  static constexpr uint32_t kStates = kAmsgrad ? 0b111 : 0b011;
  static constexpr uint32_t kSquares = NeverNegativeBits(adam::kArrays);
  static constexpr auto kPrepare =
      kKind == OptimizerKind::kAdam ? &PrepareAdam : &PrepareAdamW;
  static constexpr auto kAdvance = nullptr;
  static constexpr bool kIsSeparable = !kAmsgrad;

  OPTSTATE_HOST_DEVICE explicit Adam(const UpdateFactors& factors)
      : decay_(factors.slot[kAdamDecay]),
        exp_avg_weight_(factors.slot[kAdamExpAvgWeight]),
        square_gain_(factors.slot[kAdamSquareGain]),
        square_keep_(factors.slot[kAdamSquareKeep]),
        square_loss_(factors.slot[kAdamSquareLoss]),
        eps_(factors.slot[kAdamEps]),
        step_size_(factors.slot[kAdamStepSize]) {}

  // A NaN or infinity in any array makes the new master NaN then: a NaN goes
  // through, an infinite square gives inf - inf, and so does the decay of an
  // infinite master.
  OPTSTATE_HOST_DEVICE bool HasPlain() const { return exp_avg_weight_ > 0; }

  template <bool kPlain, class D, class V>
  OPTSTATE_OP void UpdateStates(D d, V grad, V master, V& exp_avg,
                                V& exp_avg_sq, V& max_exp_avg_sq) const {
    if constexpr (kKind == OptimizerKind::kAdam) {
      grad = WithL2Decay(d, grad, master, decay_);
    }
    exp_avg = ops::CanonicalNan<kPlain>(
        d, NextAverage<kPlain>(d, grad, exp_avg, exp_avg_weight_));
    exp_avg_sq = ops::CanonicalNan<kPlain>(
        d, NextSquareAverage<kPlain>(d, grad, exp_avg_sq, square_gain_,
                                     square_keep_, square_loss_));
    if constexpr (kAmsgrad) {
      max_exp_avg_sq = ops::CanonicalNan<kPlain>(
          d, ops::Maximum(max_exp_avg_sq, exp_avg_sq));
    }
  }

  template <bool kPlain, class D, class V>
  OPTSTATE_OP void UpdateMaster(D d, V& master, V exp_avg, V exp_avg_sq,
                                V max_exp_avg_sq) const {
    const V square = kAmsgrad ? max_exp_avg_sq : exp_avg_sq;
    const V denom = ops::Add(ops::Sqrt(square), ops::Set(d, eps_));
    V change = ops::Div(ops::Mul(ops::Set(d, step_size_), exp_avg), denom);
    if constexpr (kKind == OptimizerKind::kAdamW) {
      change = ops::Add(DecoupledDecay<kPlain>(d, master, decay_), change);
    }
    master = ops::CanonicalNan<kPlain>(d, ops::Sub(master, change));
  }

 private:
  const float decay_;
  const float exp_avg_weight_;
  const float square_gain_;
  const float square_keep_;
  const float square_loss_;
  const float eps_;
  const float step_size_;
};

// See rules.h.
template <class Visit>
decltype(auto) VisitAdam(OptimizerKind kind, uint32_t options,
                         const Visit& visit) {
  using enum OptimizerKind;
  const bool amsgrad = options == adam::kAmsgrad;
  if (kind == kAdam) {
    return amsgrad ? visit.template operator()<Adam<kAdam, true>>()
                   : visit.template operator()<Adam<kAdam, false>>();
  }
  return amsgrad ? visit.template operator()<Adam<kAdamW, true>>()
                 : visit.template operator()<Adam<kAdamW, false>>();
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
