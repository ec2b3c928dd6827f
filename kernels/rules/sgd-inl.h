// The rule of torch.optim.SGD. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_SGD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_SGD_INL_H_
#undef OPTSTATE_KERNELS_RULES_SGD_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_SGD_INL_H_
#endif

#include <cstdint>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/moments-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_SGD_FACTORS_
#define OPTSTATE_KERNELS_RULES_SGD_FACTORS_
namespace optstate::kernels {

enum SgdFactor : int {
  kSgdLr,
  kSgdDecay,
  // If 0, momentum_buffer is left alone, and the gradient is the change.
  kSgdMomentum,
  // The weight of the gradient in momentum_buffer: 1 - dampening, but 1 at the
  // first step, where the buffer, which begins as zeros, becomes the gradient.
  kSgdGain,
  // For Nesterov, the change is the gradient + momentum * momentum_buffer.
  kSgdNesterov,
};

inline UpdateFactors PrepareSgd(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  UpdateFactors factors = CommonFactors(input, h[sgd::kMaximize] != 0);
  float* slot = factors.slot;
  slot[kSgdLr] = RoundToFloat(h[sgd::kLr]);
  slot[kSgdDecay] = RoundToFloat(h[sgd::kWeightDecay]);
  slot[kSgdMomentum] = RoundToFloatNotZero(h[sgd::kMomentum]);
  slot[kSgdGain] =
      input.step_count == 1 ? 1 : RoundToFloat(1 - h[sgd::kDampening]);
  slot[kSgdNesterov] = h[sgd::kNesterov] != 0 ? 1 : 0;
  return factors;
}

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_SGD_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// State array, with momentum: momentum_buffer.
template <bool kMomentum>
class Sgd {
 public:
  static constexpr uint32_t kStates = kMomentum ? 0b001 : 0;
  static constexpr uint32_t kSquares = NeverNegativeBits(sgd::kArrays);
  static constexpr auto kPrepare = &PrepareSgd;
  static constexpr auto kAdvance = nullptr;

  OPTSTATE_HOST_DEVICE explicit Sgd(const UpdateFactors& factors)
      : lr_(factors.slot[kSgdLr]),
        decay_(factors.slot[kSgdDecay]),
        momentum_(factors.slot[kSgdMomentum]),
        gain_(factors.slot[kSgdGain]),
        nesterov_(factors.slot[kSgdNesterov]) {}

  template <class D, class V>
  OPTSTATE_OP void operator()(D d, V grad, V& master, V& buffer, V&, V&) const {
    grad = WithL2Decay(d, grad, master, decay_);
    V change = grad;
    if constexpr (kMomentum) {
      const V momentum = ops::Set(d, momentum_);
      const V next = ops::Add(ops::Product(momentum, buffer),
                              ops::Product(ops::Set(d, gain_), grad));
      const V ahead = ops::Add(grad, ops::Product(momentum, next));
      const auto is_nesterov = ops::Gt(ops::Set(d, nesterov_), ops::Zero(d));
      const auto is_on = ops::Gt(momentum, ops::Zero(d));
      change = ops::IfThenElse(is_on, ops::IfThenElse(is_nesterov, ahead, next),
                               grad);
      buffer = ops::CanonicalNan(d, ops::IfThenElse(is_on, next, buffer));
    }
    master = ops::CanonicalNan(
        d, ops::Sub(master, ops::Product(ops::Set(d, lr_), change)));
  }

 private:
  const float lr_;
  const float decay_;
  const float momentum_;
  const float gain_;
  const float nesterov_;
};

// See rules.h.
template <class Visit>
decltype(auto) VisitSgd(OptimizerKind, uint32_t options, const Visit& visit) {
  return options == sgd::kHasMomentum ? visit.template operator()<Sgd<true>>()
                                      : visit.template operator()<Sgd<false>>();
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
