// The rule of torch.optim.NAdam. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_NADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_NADAM_INL_H_
#undef OPTSTATE_KERNELS_RULES_NADAM_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_NADAM_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/decayed_moments-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_NADAM_FACTORS_
#define OPTSTATE_KERNELS_RULES_NADAM_FACTORS_
namespace optstate::kernels {

// With mu the momentum of this step, mu' that of the next, product the product
// of all up to this one, and c = sqrt(1 - beta2^t):
enum NadamFactor : int {
  // The value eps * c.
  kNadamEps = kDecayedMomentsFactors,
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
  const double correction =
      std::sqrt(1 - IntegerPower(beta2, input.step_count));
  const double mu = NadamMomentum(h, input.step_count);
  const double mu_next = NadamMomentum(h, input.step_count + 1);
  const double mu_product = input.scalar;

  UpdateFactors factors = CommonFactors(input, h[nadam::kMaximize] != 0);
  PrepareDecayedMoments({.lr = lr,
                         .beta1 = h[nadam::kBeta1],
                         .beta2 = beta2,
                         .weight_decay = h[nadam::kWeightDecay],
                         .is_decoupled = h[nadam::kDecoupledWeightDecay] != 0},
                        &factors);
  float* slot = factors.slot;
  slot[kNadamEps] = RoundToFloatNotZero(h[nadam::kEps] * correction);
  slot[kNadamGradientStep] =
      RoundToFloat(lr * (1 - mu) / (1 - mu_product) * correction);
  slot[kNadamExpAvgStep] =
      RoundToFloat(lr * mu_next / (1 - mu_product * mu_next) * correction);
  return factors;
}

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_NADAM_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// State arrays: exp_avg, exp_avg_sq.
class Nadam {
 public:
  static constexpr uint32_t kStates = 0b011;
  static constexpr uint32_t kSquares = NeverNegativeBits(adam::kMoments);
  static constexpr auto kPrepare = &PrepareNadam;
  static constexpr auto kAdvance = &AdvanceNadam;

  OPTSTATE_HOST_DEVICE explicit Nadam(const UpdateFactors& factors)
      : moments_(factors),
        eps_(factors.slot[kNadamEps]),
        gradient_step_(factors.slot[kNadamGradientStep]),
        exp_avg_step_(factors.slot[kNadamExpAvgStep]) {}

  template <class D, class V>
  OPTSTATE_OP void operator()(D d, V grad, V& master, V& exp_avg, V& exp_avg_sq,
                              V&) const {
    moments_.Update(d, master, grad, exp_avg, exp_avg_sq);
    const V denom = ops::Add(ops::Sqrt(exp_avg_sq), ops::Set(d, eps_));
    const V change =
        ops::Add(ops::Product(ops::Set(d, gradient_step_), grad),
                 ops::Product(ops::Set(d, exp_avg_step_), exp_avg));
    master = moments_.Descended(d, master, ops::Div(change, denom));
  }

 private:
  const DecayedMoments moments_;
  const float eps_;
  const float gradient_step_;
  const float exp_avg_step_;
};

// See rules.h.
template <class Visit>
decltype(auto) VisitNadam(OptimizerKind, uint32_t, const Visit& visit) {
  return visit.template operator()<Nadam>();
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
