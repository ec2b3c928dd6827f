// The rule of torch.optim.SGD.

#include <cstdint>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/factors.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/sgd.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/moments-inl.h"
#include "kernels/cpu/rule_kernels-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_RULES_SGD_CC_
#define OPTSTATE_KERNELS_CPU_RULES_SGD_CC_
namespace optstate::cpu {

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

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_RULES_SGD_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// State array, with momentum: momentum_buffer.
template <bool kMomentum>
class Sgd {
 public:
  static constexpr uint32_t kStates = kMomentum ? 0b001 : 0;
  static constexpr uint32_t kSquares = 0;
  static constexpr auto kPrepare = &PrepareSgd;
  static constexpr auto kAdvance = nullptr;

  explicit Sgd(const UpdateFactors& factors)
      : lr_(factors.slot[kSgdLr]),
        decay_(factors.slot[kSgdDecay]),
        momentum_(factors.slot[kSgdMomentum]),
        gain_(factors.slot[kSgdGain]),
        nesterov_(factors.slot[kSgdNesterov]) {}

  template <class D, class V>
  HWY_INLINE void operator()(D d, V grad, V& master, V& buffer, V&, V&) const {
    grad = WithL2Decay(d, grad, master, decay_);
    V change = grad;
    if constexpr (kMomentum) {
      const V momentum = hn::Set(d, momentum_);
      const V next =
          hn::Add(Product(momentum, buffer), Product(hn::Set(d, gain_), grad));
      const V ahead = hn::Add(grad, Product(momentum, next));
      const auto is_nesterov = hn::Gt(hn::Set(d, nesterov_), hn::Zero(d));
      const auto is_on = hn::Gt(momentum, hn::Zero(d));
      change =
          hn::IfThenElse(is_on, hn::IfThenElse(is_nesterov, ahead, next), grad);
      buffer = CanonicalNan(d, hn::IfThenElse(is_on, next, buffer));
    }
    master = CanonicalNan(d, hn::Sub(master, Product(hn::Set(d, lr_), change)));
  }

 private:
  const float lr_;
  const float decay_;
  const float momentum_;
  const float gain_;
  const float nesterov_;
};

const RuleKernels& SgdOfTarget(OptimizerKind, uint32_t options) {
  return options == sgd::kHasMomentum ? KernelsOf<Sgd<true>>()
                                      : KernelsOf<Sgd<false>>();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(SgdKernels, SgdOfTarget)
#endif  // HWY_ONCE
