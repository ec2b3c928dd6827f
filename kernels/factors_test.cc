#include "kernels/factors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace optstate::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

TEST(ExpTest, IsThatOfTheCLibrary) {
  double worst = 0;
  for (double x = -700; x <= 700; x += 0.00371) {
    worst = std::max(worst, std::abs(Exp(x) / std::exp(x) - 1));
  }
  EXPECT_LT(worst, 5e-16);
  for (double x : {1e-300, -1e-300, 1e-17, -1e-9, 0.3465735, -0.3465736}) {
    EXPECT_NEAR(Exp(x), std::exp(x), 2e-16) << x;
  }
}

TEST(ExpTest, HasTheSameEnds) {
  EXPECT_EQ(Exp(0), 1);
  EXPECT_EQ(Exp(-1000), 0);
  EXPECT_EQ(Exp(-std::numeric_limits<double>::max()), 0);
  EXPECT_TRUE(std::isinf(Exp(1000)));
  EXPECT_EQ(Exp(-std::numeric_limits<double>::infinity()), 0);
  EXPECT_TRUE(std::isnan(Exp(std::numeric_limits<double>::quiet_NaN())));
  EXPECT_NEAR(Exp(-740) / std::exp(-740), 1, 0.1);  // a denormal
}

TEST(CommonFactorsTest, NoLimitIsInfinity) {
  UpdateInput input;
  EXPECT_EQ(CommonFactors(input, false).gradient_limit, kInfinity);
  input.gradient_limit = 1e300;
  EXPECT_EQ(CommonFactors(input, false).gradient_limit, kInfinity);
  input.gradient_limit = 0.1;
  EXPECT_EQ(CommonFactors(input, false).gradient_limit, 0.1f);
  input.gradient_limit = 1e-300;
  EXPECT_GT(CommonFactors(input, false).gradient_limit, 0);
}

TEST(CommonFactorsTest, AnInfiniteGradientFactorStaysSo) {
  UpdateInput input;
  input.gradient_factor = std::numeric_limits<double>::infinity();
  EXPECT_EQ(CommonFactors(input, false).gradient_factor, kInfinity);
  EXPECT_EQ(CommonFactors(input, true).gradient_factor, -kInfinity);
  input.gradient_factor = 1e300;
  EXPECT_EQ(CommonFactors(input, true).gradient_factor, -kLargest);
}

TEST(AverageTest, CountsFromTheNearerSide) {
  EXPECT_EQ(AverageWeight(0.75), 0.25f);
  EXPECT_EQ(AverageWeight(0.25), -0.25f);
  EXPECT_EQ(AverageGain(0.25), 0.75f);
  EXPECT_EQ(AverageKeep(0.75), 1);
  EXPECT_EQ(AverageLoss(0.75), 0.25f);
  EXPECT_EQ(AverageKeep(0.25), 0.25f);
  EXPECT_EQ(AverageLoss(0.25), 0);
}

}  // namespace
}  // namespace optstate::kernels
