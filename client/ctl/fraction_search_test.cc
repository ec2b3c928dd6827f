#include "client/ctl/fraction_search.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

constexpr size_t kSteps =
    FractionSearch::kSettlingSteps + FractionSearch::kMeasuredSteps;
constexpr size_t kStepsMax = FractionSearch::kTriedMax * kSteps;

using Seconds = std::function<double(double fraction)>;

// Returns the time of an update when the CPU alone takes 1 and devices alone
// `devices`, and to use them at all `overhead`.
Seconds Shared(double devices, double overhead) {
  return [=](double fraction) {
    return std::max(fraction, (1 - fraction) * devices) +
           (fraction < 1 ? overhead : 0);
  };
}

FractionSearch Searched(const Seconds& seconds) {
  FractionSearch search;
  for (size_t i = 0; !search.is_over(); ++i) {
    EXPECT_LT(i, kStepsMax);
    if (i >= kStepsMax) break;
    search.Note(seconds(search.fraction()));
  }
  return search;
}

TEST(FractionSearchTest, TheFastestIsFound) {
  for (const double devices : {0.01, 0.1, 0.5, 1.0, 2.0, 9.0, 100.0}) {
    for (const double overhead : {0.0, 0.05, 0.3}) {
      const Seconds seconds = Shared(devices, overhead);
      double best = 1;
      for (int n = 0; n <= 1000; ++n) {
        if (seconds(n / 1000.0) < seconds(best)) best = n / 1000.0;
      }
      const double found = Searched(seconds).fraction();
      EXPECT_TRUE(std::abs(found - best) <= 0.03 ||
                  seconds(found) <= 1.02 * seconds(best))
          << devices << " " << overhead << ": " << found << " for " << best;
    }
  }
}

TEST(FractionSearchTest, TheBalanceIsTriedThird) {
  const FractionSearch search = Searched(Shared(3, 0));
  EXPECT_EQ(search.fraction(), 0.75);
  EXPECT_EQ(search.best(), 0.75);
  EXPECT_EQ(search.SecondsOf(1), 1);
  EXPECT_EQ(search.SecondsOf(0), 3);
  EXPECT_EQ(search.SecondsOf(0.75), 0.75);
  EXPECT_FALSE(search.SecondsOf(0.1).has_value());
  EXPECT_GT(search.tried(), 3u);
}

TEST(FractionSearchTest, TheCpuAloneStaysWhereNothingIsGained) {
  EXPECT_EQ(Searched(Shared(9, 0.5)).fraction(), 1);
  EXPECT_EQ(Searched([](double) { return 1.0; }).fraction(), 1);
  EXPECT_EQ(Searched([](double) { return 0.0; }).fraction(), 1);
}

TEST(FractionSearchTest, DisturbedStepsDoNotCount) {
  size_t steps = 0;
  const FractionSearch search = Searched([&](double fraction) {
    // All steps with a fraction but the last one take longer.
    return ++steps % kSteps == 0 ? Shared(1, 0)(fraction) : 50;
  });
  EXPECT_NEAR(search.fraction(), 0.5, 0.03);
  EXPECT_EQ(steps, kSteps * search.tried());
}

TEST(FractionSearchTest, TheEndIsKept) {
  FractionSearch search = Searched(Shared(1, 0));
  for (int i = 0; i < 10; ++i) search.Note(100);
  EXPECT_TRUE(search.is_over());
  EXPECT_EQ(search.fraction(), 0.5);
}

TEST(FractionSearchTest, NothingIsKnownAtFirst) {
  const FractionSearch search;
  EXPECT_FALSE(search.best().has_value());
  EXPECT_FALSE(search.is_over());
  EXPECT_EQ(search.fraction(), 1);
}

}  // namespace
}  // namespace optstate::ctl
