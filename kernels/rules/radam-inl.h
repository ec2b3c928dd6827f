// The rule of torch.optim.RAdam. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_RADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_RADAM_INL_H_
#undef OPTSTATE_KERNELS_RULES_RADAM_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_RADAM_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/decayed_moments-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_RADAM_FACTORS_
#define OPTSTATE_KERNELS_RULES_RADAM_FACTORS_
namespace optstate::kernels {

// With bc1 = 1 - beta1^t, bc2 = 1 - beta2^t and rect the variance rectification
// of this step, when there is one:
enum RadamFactor : int {
  kRadamEps = kDecayedMomentsFactors,
  // If 1, exp_avg is divided by sqrt(exp_avg_sq) + eps; if 0, it is not.
  kRadamIsRectified,
  // The value lr / bc1, rectified times sqrt(bc2) * rect.
  kRadamStepSize,
};

inline UpdateFactors PrepareRadam(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  const double lr = h[radam::kLr];
  const double beta2 = h[radam::kBeta2];
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
  PrepareDecayedMoments({.lr = lr,
                         .beta1 = h[radam::kBeta1],
                         .beta2 = beta2,
                         .weight_decay = h[radam::kWeightDecay],
                         .is_decoupled = h[radam::kDecoupledWeightDecay] != 0},
                        &factors);
  float* slot = factors.slot;
  slot[kRadamEps] = RoundToFloatNotZero(h[radam::kEps]);
  slot[kRadamIsRectified] = is_rectified ? 1 : 0;
  slot[kRadamStepSize] =
      RoundToFloat(lr / bc1 * (is_rectified ? rectified : 1));
  return factors;
}

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_RADAM_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// State arrays: exp_avg, exp_avg_sq.
class Radam {
 public:
  static constexpr uint32_t kStates = 0b011;
  static constexpr uint32_t kSquares = NeverNegativeBits(adam::kMoments);
  static constexpr auto kPrepare = &PrepareRadam;
  static constexpr auto kAdvance = nullptr;

  OPTSTATE_HOST_DEVICE explicit Radam(const UpdateFactors& factors)
      : moments_(factors),
        eps_(factors.slot[kRadamEps]),
        is_rectified_(factors.slot[kRadamIsRectified]),
        step_size_(factors.slot[kRadamStepSize]) {}

  template <class D, class V>
  OPTSTATE_OP void operator()(D d, V grad, V& master, V& exp_avg, V& exp_avg_sq,
                              V&) const {
    moments_.Update(d, master, grad, exp_avg, exp_avg_sq);
    const V one = ops::Set(d, 1.0f);
    const V denom = ops::IfThenElse(
        ops::Gt(ops::Set(d, is_rectified_), ops::Zero(d)),
        ops::Add(ops::Sqrt(exp_avg_sq), ops::Set(d, eps_)), one);
    const V change =
        ops::Div(ops::Mul(ops::Set(d, step_size_), exp_avg), denom);
    master = moments_.Descended(d, master, change);
  }

 private:
  const DecayedMoments moments_;
  const float eps_;
  const float is_rectified_;
  const float step_size_;
};

// See rules.h.
template <class Visit>
decltype(auto) VisitRadam(OptimizerKind, uint32_t, const Visit& visit) {
  return visit.template operator()<Radam>();
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
