#include "kernels/power.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace optstate::kernels {
namespace {

TEST(LogTest, IsThatOfTheCLibrary) {
  double worst = 0;
  for (double x = 1e-300; x < 1e300; x *= 1.00371) {
    if (x == 1) continue;
    worst = std::max(worst, std::abs(Log(x) / std::log(x) - 1));
  }
  for (double x = 0.5; x < 2; x += 0.0000371) {
    worst = std::max(worst, std::abs(Log(x) / std::log(x) - 1));
  }
  EXPECT_LT(worst, 5e-16);
  EXPECT_EQ(Log(1), 0);
  for (double x : {std::numeric_limits<double>::denorm_min(),
                   std::numeric_limits<double>::max(), 1 + 1e-15, 1 - 1e-15}) {
    EXPECT_NEAR(Log(x) / std::log(x), 1, 5e-16) << x;
  }
}

TEST(PowerTest, IsThatOfTheCLibrary) {
  double worst = 0;
  for (double exponent : {-0.8, -0.5, -1.0, -0.001, -0.33}) {
    for (double step = 1; step < 1e12; step = std::ceil(step * 1.0371)) {
      worst = std::max(
          worst,
          std::abs(Power(step, exponent) / std::pow(step, exponent) - 1));
    }
  }
  EXPECT_LT(worst, 1e-14);
  RecordProperty("worst_relative_error", std::to_string(worst * 1e15) + "e-15");
}

TEST(PowerTest, HasTheSameEnds) {
  EXPECT_EQ(Power(1, -0.8), 1);
  EXPECT_EQ(Power(7, 0), 1);
  EXPECT_EQ(Power(2, -1e6), 0);
  EXPECT_TRUE(std::isinf(Power(2, 1e300)));
}

}  // namespace
}  // namespace optstate::kernels
