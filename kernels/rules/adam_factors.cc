#include "kernels/rules/adam_factors.h"

#include <cmath>

#include "kernels/factors.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

UpdateFactors Prepare(const UpdateInput& input, double decay) {
  const Hyperparams& h = input.hyperparams;
  const double beta1 = h[adam::kBeta1];
  const double beta2 = h[adam::kBeta2];
  const double bias_correction1 = 1 - IntegerPower(beta1, input.step_count);
  const double bias_correction2_sqrt =
      std::sqrt(1 - IntegerPower(beta2, input.step_count));

  UpdateFactors factors = CommonFactors(input, h[adam::kMaximize] != 0);
  float* slot = factors.slot;
  slot[kAdamDecay] = RoundToFloat(decay);
  slot[kAdamExpAvgWeight] = AverageWeight(beta1);
  slot[kAdamSquareGain] = AverageGain(beta2);
  slot[kAdamSquareKeep] = AverageKeep(beta2);
  slot[kAdamSquareLoss] = AverageLoss(beta2);
  // A denominator of 0 would make NaN of the elements that never had a
  // gradient.
  slot[kAdamEps] = RoundToFloatNotZero(h[adam::kEps] * bias_correction2_sqrt);
  slot[kAdamStepSize] =
      RoundToFloat(h[adam::kLr] / bias_correction1 * bias_correction2_sqrt);
  return factors;
}

}  // namespace

UpdateFactors PrepareAdam(const UpdateInput& input) {
  return Prepare(input, input.hyperparams[adam::kWeightDecay]);
}

UpdateFactors PrepareAdamW(const UpdateInput& input) {
  return Prepare(input, input.hyperparams[adam::kLr] *
                            input.hyperparams[adam::kWeightDecay]);
}

}  // namespace optstate::kernels
