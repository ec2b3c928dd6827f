// The rule of torch.optim.RAdam.

#include <cmath>
#include <cstdint>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/factors.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/radam.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/moments-inl.h"
#include "kernels/cpu/rule_kernels-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_RULES_RADAM_CC_
#define OPTSTATE_KERNELS_CPU_RULES_RADAM_CC_
namespace optstate::cpu {

// With bc1 = 1 - beta1^t, bc2 = 1 - beta2^t and rect the variance rectification
// of this step, when there is one:
enum RadamFactor : int {
  // The values weight_decay and 0, or 0 and lr * weight_decay when decoupled.
  kRadamDecay,
  kRadamDecoupledDecay,
  // The factors of exp_avg and of exp_avg_sq: see factors.h.
  kRadamExpAvgWeight,
  kRadamSquareGain,
  kRadamSquareKeep,
  kRadamSquareLoss,
  kRadamEps,
  // If 1, exp_avg is divided by sqrt(exp_avg_sq) + eps; if 0, it is not.
  kRadamIsRectified,
  // The value lr / bc1, rectified times sqrt(bc2) * rect.
  kRadamStepSize,
};

inline UpdateFactors PrepareRadam(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  const double lr = h[radam::kLr];
  const double beta2 = h[radam::kBeta2];
  const double decay = h[radam::kWeightDecay];
  const bool is_decoupled = h[radam::kDecoupledWeightDecay] != 0;
  const double bc1 = 1 - IntegerPower(h[radam::kBeta1], input.step_count);
  const double beta2_power = IntegerPower(beta2, input.step_count);
  const double bc2 = 1 - beta2_power;
  const double rho_inf = 2 / (1 - beta2) - 1;
  const double rho =
      rho_inf - 2 * static_cast<double>(input.step_count) * beta2_power / bc2;
  const bool is_rectified = rho > 5;
  const double rectified = std::sqrt((rho - 4) * (rho - 2) * rho_inf /
                                     ((rho_inf - 4) * (rho_inf - 2) * rho)) *
                           std::sqrt(bc2);

  UpdateFactors factors = CommonFactors(input, h[radam::kMaximize] != 0);
  float* slot = factors.slot;
  slot[kRadamDecay] = RoundToFloat(is_decoupled ? 0 : decay);
  slot[kRadamDecoupledDecay] = RoundToFloat(is_decoupled ? lr * decay : 0);
  slot[kRadamExpAvgWeight] = AverageWeight(h[radam::kBeta1]);
  slot[kRadamSquareGain] = AverageGain(beta2);
  slot[kRadamSquareKeep] = AverageKeep(beta2);
  slot[kRadamSquareLoss] = AverageLoss(beta2);
  slot[kRadamEps] = RoundToFloatNotZero(h[radam::kEps]);
  slot[kRadamIsRectified] = is_rectified ? 1 : 0;
  slot[kRadamStepSize] =
      RoundToFloat(lr / bc1 * (is_rectified ? rectified : 1));
  return factors;
}

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_RULES_RADAM_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// State arrays: exp_avg, exp_avg_sq.
class Radam {
 public:
  static constexpr uint32_t kStates = 0b011;
  static constexpr uint32_t kSquares = 0b010;
  static constexpr auto kPrepare = &PrepareRadam;
  static constexpr auto kAdvance = nullptr;

  explicit Radam(const UpdateFactors& factors)
      : decay_(factors.slot[kRadamDecay]),
        decoupled_decay_(factors.slot[kRadamDecoupledDecay]),
        exp_avg_weight_(factors.slot[kRadamExpAvgWeight]),
        square_gain_(factors.slot[kRadamSquareGain]),
        square_keep_(factors.slot[kRadamSquareKeep]),
        square_loss_(factors.slot[kRadamSquareLoss]),
        eps_(factors.slot[kRadamEps]),
        is_rectified_(factors.slot[kRadamIsRectified]),
        step_size_(factors.slot[kRadamStepSize]) {}

  template <class D, class V>
  HWY_INLINE void operator()(D d, V grad, V& master, V& exp_avg, V& exp_avg_sq,
                             V&) const {
    grad = WithL2Decay(d, grad, master, decay_);
    exp_avg = CanonicalNan(d, NextAverage(d, grad, exp_avg, exp_avg_weight_));
    exp_avg_sq =
        CanonicalNan(d, NextSquareAverage(d, grad, exp_avg_sq, square_gain_,
                                          square_keep_, square_loss_));
    const V one = hn::Set(d, 1.0f);
    const V denom =
        hn::IfThenElse(hn::Gt(hn::Set(d, is_rectified_), hn::Zero(d)),
                       hn::Add(hn::Sqrt(exp_avg_sq), hn::Set(d, eps_)), one);
    const V change = hn::Div(hn::Mul(hn::Set(d, step_size_), exp_avg), denom);
    master = CanonicalNan(
        d, hn::Sub(master, hn::Add(DecoupledDecay(d, master, decoupled_decay_),
                                   change)));
  }

 private:
  const float decay_;
  const float decoupled_decay_;
  const float exp_avg_weight_;
  const float square_gain_;
  const float square_keep_;
  const float square_loss_;
  const float eps_;
  const float is_rectified_;
  const float step_size_;
};

const RuleKernels& RadamOfTarget(OptimizerKind, uint32_t) {
  return KernelsOf<Radam>();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(RadamKernels, RadamOfTarget)
#endif  // HWY_ONCE
