#include "kernels/adam_factors.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace optstate {
namespace {

// base^exponent by squaring. Not std::pow: the C library picks its variant by
// CPU and they differ in the last bit.
double IntegerPower(double base, int64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) power *= base;
    base *= base;
  }
  return power;
}

float RoundToFloat(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(value, -kLargest, kLargest));
}

// An infinite factor is the caller's word that the gradients are not finite.
float RoundGradientFactor(double value) {
  return std::isinf(value) ? static_cast<float>(value) : RoundToFloat(value);
}

UpdateFactors Prepare(const Hyperparams& hyperparams, double decay,
                      int64_t step_count, double gradient_factor) {
  const double beta1 = hyperparams.beta1;
  const double beta2 = hyperparams.beta2;
  const double bias_correction1 = 1 - IntegerPower(beta1, step_count);
  const double bias_correction2_sqrt =
      std::sqrt(1 - IntegerPower(beta2, step_count));
  const bool from_exp_avg = 1 - beta1 < 0.5;
  const bool from_exp_avg_sq = 1 - beta2 < 0.5;
  const double eps = hyperparams.eps;
  // A denominator of 0 would make NaN of the elements that never had a
  // gradient.
  const float eps_min =
      eps > 0 ? std::numeric_limits<float>::denorm_min() : 0.0f;

  UpdateFactors factors;
  float* slot = factors.slot;
  slot[kAdamGradientFactor] = RoundGradientFactor(
      hyperparams.maximize ? -gradient_factor : gradient_factor);
  slot[kAdamDecay] = RoundToFloat(decay);
  slot[kAdamExpAvgWeight] = RoundToFloat(from_exp_avg ? 1 - beta1 : -beta1);
  slot[kAdamSquareGain] = RoundToFloat(1 - beta2);
  slot[kAdamSquareKeep] = RoundToFloat(from_exp_avg_sq ? 1 : beta2);
  slot[kAdamSquareLoss] = RoundToFloat(from_exp_avg_sq ? 1 - beta2 : 0);
  slot[kAdamEps] = std::max(RoundToFloat(eps * bias_correction2_sqrt), eps_min);
  slot[kAdamStepSize] =
      RoundToFloat(hyperparams.lr / bias_correction1 * bias_correction2_sqrt);
  return factors;
}

}  // namespace

UpdateFactors PrepareAdam(const Hyperparams& hyperparams, int64_t step_count,
                          double gradient_factor) {
  return Prepare(hyperparams, hyperparams.weight_decay, step_count,
                 gradient_factor);
}

UpdateFactors PrepareAdamW(const Hyperparams& hyperparams, int64_t step_count,
                           double gradient_factor) {
  return Prepare(hyperparams, hyperparams.lr * hyperparams.weight_decay,
                 step_count, gradient_factor);
}

}  // namespace optstate
