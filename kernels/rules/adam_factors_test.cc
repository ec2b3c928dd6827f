#include "kernels/rules/adam_factors.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

UpdateInput DefaultInput(OptimizerKind kind) {
  UpdateInput input;
  input.hyperparams = DefaultHyperparams(kind);
  return input;
}

TEST(AdamFactorsTest, AreTheFormulasRoundedOnce) {
  UpdateInput input = DefaultInput(OptimizerKind::kAdamW);
  input.hyperparams[adam::kLr] = 3e-4;
  input.hyperparams[adam::kBeta2] = 0.95;
  input.hyperparams[adam::kWeightDecay] = 0.1;
  input.gradient_factor = 0.25;
  for (int step : {1, 2, 3, 10, 1000, 123457}) {
    const double bc1 = 1 - std::pow(0.9, step);
    const double bc2_sqrt = std::sqrt(1 - std::pow(0.95, step));
    input.step_count = step;
    const UpdateFactors factors = PrepareAdamW(input);
    EXPECT_FLOAT_EQ(factors.gradient_factor, 0.25f);
    EXPECT_FLOAT_EQ(factors.slot[kAdamDecay], static_cast<float>(3e-4 * 0.1));
    EXPECT_FLOAT_EQ(factors.slot[kAdamExpAvgWeight], 0.1f);
    EXPECT_FLOAT_EQ(factors.slot[kAdamSquareGain], 0.05f);
    EXPECT_EQ(factors.slot[kAdamSquareKeep], 1);
    EXPECT_EQ(factors.slot[kAdamSquareLoss], factors.slot[kAdamSquareGain]);
    EXPECT_FLOAT_EQ(factors.slot[kAdamEps],
                    static_cast<float>(1e-8 * bc2_sqrt));
    EXPECT_FLOAT_EQ(factors.slot[kAdamStepSize],
                    static_cast<float>(3e-4 / bc1 * bc2_sqrt));
  }
}

TEST(AdamFactorsTest, PowersOfLargeStepCountsAreExactEnough) {
  UpdateInput input = DefaultInput(OptimizerKind::kAdam);
  input.hyperparams[adam::kLr] = 1;
  input.hyperparams[adam::kEps] = 1;
  for (double beta : {0.9, 0.999, 0.9999999}) {
    input.hyperparams[adam::kBeta1] = input.hyperparams[adam::kBeta2] = beta;
    for (int64_t step : {int64_t{1}, int64_t{1000}, int64_t{999999},
                         int64_t{1} << 40, int64_t{1} << 62}) {
      const double truth = 1 - std::pow(beta, static_cast<double>(step));
      input.step_count = step;
      EXPECT_FLOAT_EQ(PrepareAdam(input).slot[kAdamEps],
                      static_cast<float>(std::sqrt(truth)))
          << beta << "^" << step;
    }
  }
}

TEST(AdamFactorsTest, AdamDecayIsNotScaledByTheLearningRate) {
  UpdateInput input = DefaultInput(OptimizerKind::kAdam);
  input.hyperparams[adam::kWeightDecay] = 0.5;
  EXPECT_EQ(PrepareAdam(input).slot[kAdamDecay], 0.5f);
}

TEST(AdamFactorsTest, MaximizeNegatesTheGradientAlone) {
  UpdateInput input = DefaultInput(OptimizerKind::kAdamW);
  input.step_count = 7;
  input.gradient_factor = 2;
  const UpdateFactors down = PrepareAdamW(input);
  input.hyperparams[adam::kMaximize] = 1;
  const UpdateFactors up = PrepareAdamW(input);
  EXPECT_EQ(up.gradient_factor, -down.gradient_factor);
  for (int k = 0; k < 13; ++k) EXPECT_EQ(up.slot[k], down.slot[k]) << k;
}

TEST(AdamFactorsTest, SmallBetasCountFromTheGradient) {
  UpdateInput input = DefaultInput(OptimizerKind::kAdam);
  input.hyperparams[adam::kBeta1] = 0;
  input.hyperparams[adam::kBeta2] = 0.25;
  const UpdateFactors factors = PrepareAdam(input);
  EXPECT_LE(factors.slot[kAdamExpAvgWeight], 0);
  EXPECT_EQ(factors.slot[kAdamSquareGain], 0.75f);
  EXPECT_EQ(factors.slot[kAdamSquareKeep], 0.25f);
  EXPECT_EQ(factors.slot[kAdamSquareLoss], 0);
}

TEST(AdamFactorsTest, OutOfRangeValuesStaySane) {
  UpdateInput input = DefaultInput(OptimizerKind::kAdamW);
  input.hyperparams[adam::kLr] = 1e300;
  input.hyperparams[adam::kWeightDecay] = 1e300;
  input.hyperparams[adam::kEps] = 1e-300;
  const UpdateFactors factors = PrepareAdamW(input);
  EXPECT_EQ(factors.slot[kAdamStepSize], kLargest);
  EXPECT_EQ(factors.slot[kAdamDecay], kLargest);
  EXPECT_GT(factors.slot[kAdamEps], 0);
  input.hyperparams[adam::kEps] = 0;
  EXPECT_EQ(PrepareAdamW(input).slot[kAdamEps], 0);
}

}  // namespace
}  // namespace optstate::kernels
