// The rule of torch.optim.NAdam.

#include <cmath>
#include <cstdint>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"
#include "kernels/factors.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/nadam.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/moments-inl.h"
#include "kernels/cpu/rule_kernels-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_RULES_NADAM_CC_
#define OPTSTATE_KERNELS_CPU_RULES_NADAM_CC_
namespace optstate::cpu {

// With mu the momentum of this step, mu' that of the next, product the product
// of all up to this one, and c = sqrt(1 - beta2^t):
enum NadamFactor : int {
  // The values weight_decay and 0, or 0 and lr * weight_decay when decoupled.
  kNadamDecay,
  kNadamDecoupledDecay,
  // The factors of exp_avg and of exp_avg_sq: see factors.h.
  kNadamExpAvgWeight,
  kNadamSquareGain,
  kNadamSquareKeep,
  kNadamSquareLoss,
  // The value eps * c.
  kNadamEps,
  // The value lr * (1 - mu) / (1 - product) * c.
  kNadamGradientStep,
  // The value lr * mu' / (1 - product * mu') * c.
  kNadamExpAvgStep,
};

// Returns the momentum; 0.96^(t * momentum_decay) goes with that of step t.
inline double NadamMomentum(const Hyperparams& h, int64_t step_count) {
  constexpr double kLogOf096 = -0.040821994520255166;
  const double exponent =
      static_cast<double>(step_count) * h[nadam::kMomentumDecay];
  return h[nadam::kBeta1] * (1 - 0.5 * Exp(exponent * kLogOf096));
}

inline double AdvanceNadam(const Hyperparams& hyperparams, int64_t step_count,
                           double mu_product) {
  return mu_product * NadamMomentum(hyperparams, step_count);
}

inline UpdateFactors PrepareNadam(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  const double lr = h[nadam::kLr];
  const double beta2 = h[nadam::kBeta2];
  const double decay = h[nadam::kWeightDecay];
  const bool is_decoupled = h[nadam::kDecoupledWeightDecay] != 0;
  const double correction =
      std::sqrt(1 - IntegerPower(beta2, input.step_count));
  const double mu = NadamMomentum(h, input.step_count);
  const double mu_next = NadamMomentum(h, input.step_count + 1);
  const double mu_product = input.scalar;

  UpdateFactors factors = CommonFactors(input, h[nadam::kMaximize] != 0);
  float* slot = factors.slot;
  slot[kNadamDecay] = RoundToFloat(is_decoupled ? 0 : decay);
  slot[kNadamDecoupledDecay] = RoundToFloat(is_decoupled ? lr * decay : 0);
  slot[kNadamExpAvgWeight] = AverageWeight(h[nadam::kBeta1]);
  slot[kNadamSquareGain] = AverageGain(beta2);
  slot[kNadamSquareKeep] = AverageKeep(beta2);
  slot[kNadamSquareLoss] = AverageLoss(beta2);
  slot[kNadamEps] = RoundToFloatNotZero(h[nadam::kEps] * correction);
  slot[kNadamGradientStep] =
      RoundToFloat(lr * (1 - mu) / (1 - mu_product) * correction);
  slot[kNadamExpAvgStep] =
      RoundToFloat(lr * mu_next / (1 - mu_product * mu_next) * correction);
  return factors;
}

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_RULES_NADAM_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// State arrays: exp_avg, exp_avg_sq.
class Nadam {
 public:
  static constexpr uint32_t kStates = 0b011;
  static constexpr uint32_t kSquares = 0b010;
  static constexpr auto kPrepare = &PrepareNadam;
  static constexpr auto kAdvance = &AdvanceNadam;

  explicit Nadam(const UpdateFactors& factors)
      : decay_(factors.slot[kNadamDecay]),
        decoupled_decay_(factors.slot[kNadamDecoupledDecay]),
        exp_avg_weight_(factors.slot[kNadamExpAvgWeight]),
        square_gain_(factors.slot[kNadamSquareGain]),
        square_keep_(factors.slot[kNadamSquareKeep]),
        square_loss_(factors.slot[kNadamSquareLoss]),
        eps_(factors.slot[kNadamEps]),
        gradient_step_(factors.slot[kNadamGradientStep]),
        exp_avg_step_(factors.slot[kNadamExpAvgStep]) {}

  template <class D, class V>
  HWY_INLINE void operator()(D d, V grad, V& master, V& exp_avg, V& exp_avg_sq,
                             V&) const {
    grad = WithL2Decay(d, grad, master, decay_);
    exp_avg = CanonicalNan(d, NextAverage(d, grad, exp_avg, exp_avg_weight_));
    exp_avg_sq =
        CanonicalNan(d, NextSquareAverage(d, grad, exp_avg_sq, square_gain_,
                                          square_keep_, square_loss_));
    const V denom = hn::Add(hn::Sqrt(exp_avg_sq), hn::Set(d, eps_));
    const V change = hn::Add(Product(hn::Set(d, gradient_step_), grad),
                             Product(hn::Set(d, exp_avg_step_), exp_avg));
    master = CanonicalNan(
        d, hn::Sub(master, hn::Add(DecoupledDecay(d, master, decoupled_decay_),
                                   hn::Div(change, denom))));
  }

 private:
  const float decay_;
  const float decoupled_decay_;
  const float exp_avg_weight_;
  const float square_gain_;
  const float square_keep_;
  const float square_loss_;
  const float eps_;
  const float gradient_step_;
  const float exp_avg_step_;
};

const RuleKernels& NadamOfTarget(OptimizerKind, uint32_t) {
  return KernelsOf<Nadam>();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(NadamKernels, NadamOfTarget)
#endif  // HWY_ONCE
