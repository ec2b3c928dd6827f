#include "kernels/adam_factors.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace optstate {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

TEST(AdamFactorsTest, AreTheFormulasRoundedOnce) {
  Hyperparams h;
  h.lr = 3e-4;
  h.beta1 = 0.9;
  h.beta2 = 0.95;
  h.weight_decay = 0.1;
  for (int step : {1, 2, 3, 10, 1000, 123457}) {
    const double bc1 = 1 - std::pow(h.beta1, step);
    const double bc2_sqrt = std::sqrt(1 - std::pow(h.beta2, step));
    const UpdateFactors factors = PrepareAdamW(h, step, 0.25);
    EXPECT_FLOAT_EQ(factors.slot[kAdamGradientFactor], 0.25f);
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
  Hyperparams h;
  h.lr = 1;
  h.eps = 1;
  for (double beta : {0.9, 0.999, 0.9999999}) {
    h.beta1 = h.beta2 = beta;
    for (int64_t step : {int64_t{1}, int64_t{1000}, int64_t{999999},
                         int64_t{1} << 40, int64_t{1} << 62}) {
      const double truth = 1 - std::pow(beta, static_cast<double>(step));
      const UpdateFactors factors = PrepareAdam(h, step, 1);
      EXPECT_FLOAT_EQ(factors.slot[kAdamEps],
                      static_cast<float>(std::sqrt(truth)))
          << beta << "^" << step;
    }
  }
}

TEST(AdamFactorsTest, AdamDecayIsNotScaledByTheLearningRate) {
  Hyperparams h;
  h.weight_decay = 0.5;
  EXPECT_EQ(PrepareAdam(h, 1, 1).slot[kAdamDecay], 0.5f);
}

TEST(AdamFactorsTest, MaximizeNegatesTheGradientAlone) {
  Hyperparams h;
  h.weight_decay = 0.5;
  const UpdateFactors down = PrepareAdamW(h, 7, 2);
  h.maximize = true;
  UpdateFactors up = PrepareAdamW(h, 7, 2);
  EXPECT_EQ(up.slot[kAdamGradientFactor], -down.slot[kAdamGradientFactor]);
  up.slot[kAdamGradientFactor] = down.slot[kAdamGradientFactor];
  for (int k = 0; k < 12; ++k) EXPECT_EQ(up.slot[k], down.slot[k]) << k;
}

TEST(AdamFactorsTest, SmallBetasCountFromTheGradient) {
  Hyperparams h;
  h.beta1 = 0;
  h.beta2 = 0.25;
  const UpdateFactors factors = PrepareAdam(h, 3, 1);
  EXPECT_LE(factors.slot[kAdamExpAvgWeight], 0);
  EXPECT_EQ(factors.slot[kAdamSquareGain], 0.75f);
  EXPECT_EQ(factors.slot[kAdamSquareKeep], 0.25f);
  EXPECT_EQ(factors.slot[kAdamSquareLoss], 0);
}

TEST(AdamFactorsTest, OutOfRangeValuesStaySane) {
  Hyperparams h;
  h.lr = 1e300;
  h.weight_decay = 1e300;
  h.eps = 1e-300;
  const UpdateFactors factors = PrepareAdamW(h, 1, 1);
  EXPECT_EQ(factors.slot[kAdamStepSize], kLargest);
  EXPECT_EQ(factors.slot[kAdamDecay], kLargest);
  EXPECT_GT(factors.slot[kAdamEps], 0);
  h.eps = 0;
  EXPECT_EQ(PrepareAdamW(h, 1, 1).slot[kAdamEps], 0);
  EXPECT_TRUE(
      std::isinf(PrepareAdam(h, 1, std::numeric_limits<double>::infinity())
                     .slot[kAdamGradientFactor]));
}

}  // namespace
}  // namespace optstate
