#include "tests/load/quantiles.h"

#include "gtest/gtest.h"

namespace optstate::load {
namespace {

TEST(QuantilesTest, OfNoneAreZero) {
  const Quantiles none = QuantilesOf({});
  EXPECT_EQ(none.count, 0);
  EXPECT_EQ(none.p99_ms, 0);
  EXPECT_EQ(P99Ratio({1}, {}), 0);
}

TEST(QuantilesTest, OfOneAreThatOne) {
  const Quantiles one = QuantilesOf({7});
  EXPECT_EQ(one.count, 1);
  EXPECT_EQ(one.p50_ms, 7);
  EXPECT_EQ(one.p99_ms, 7);
  EXPECT_EQ(one.max_ms, 7);
}

TEST(QuantilesTest, OrderDoesNotMatter) {
  std::vector<double> times;
  for (int i = 0; i < 200; ++i) times.push_back((i * 7) % 200 + 1);
  const Quantiles quantiles = QuantilesOf(times);
  EXPECT_EQ(quantiles.p50_ms, 100);
  EXPECT_EQ(quantiles.p99_ms, 198);
  EXPECT_EQ(quantiles.max_ms, 200);
  EXPECT_EQ(P99Ratio(times, {99}), 2);
}

}  // namespace
}  // namespace optstate::load
