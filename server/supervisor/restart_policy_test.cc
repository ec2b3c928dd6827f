#include "server/supervisor/restart_policy.h"

#include <gtest/gtest.h>

namespace optstate::supervisor {
namespace {

constexpr absl::Duration kWindow = absl::Seconds(60);

TEST(RestartPolicyTest, FirstAtOnceThenDoubling) {
  RestartPolicy policy(20, kWindow);
  const absl::Time now = absl::FromUnixSeconds(1000);
  EXPECT_EQ(policy.OnDeath(now), absl::ZeroDuration());
  EXPECT_EQ(policy.OnDeath(now), absl::Milliseconds(100));
  EXPECT_EQ(policy.OnDeath(now), absl::Milliseconds(200));
  for (int i = 3; i < 20; ++i) {
    const auto delay = policy.OnDeath(now);
    ASSERT_TRUE(delay.has_value()) << i;
    EXPECT_LE(*delay, absl::Seconds(5));
    EXPECT_GT(*delay, absl::ZeroDuration());
  }
  EXPECT_FALSE(policy.OnDeath(now).has_value());
}

TEST(RestartPolicyTest, OnlyDeathsWithinTheWindowCount) {
  RestartPolicy policy(2, kWindow);
  absl::Time now = absl::FromUnixSeconds(1000);
  EXPECT_TRUE(policy.OnDeath(now).has_value());
  EXPECT_TRUE(policy.OnDeath(now + absl::Seconds(30)).has_value());
  EXPECT_FALSE(policy.OnDeath(now + absl::Seconds(59)).has_value());
  // The first restart is a window ago.
  EXPECT_TRUE(policy.OnDeath(now + kWindow).has_value());
  EXPECT_FALSE(policy.OnDeath(now + kWindow).has_value());
}

TEST(RestartPolicyTest, DeathsFarApartAreRestartedAtOnceForEver) {
  RestartPolicy policy(1, kWindow);
  absl::Time now = absl::FromUnixSeconds(1000);
  for (int i = 0; i < 100; ++i, now += kWindow) {
    EXPECT_EQ(policy.OnDeath(now), absl::ZeroDuration());
  }
}

TEST(RestartPolicyTest, NoneAllowed) {
  EXPECT_FALSE(
      RestartPolicy(0, kWindow).OnDeath(absl::FromUnixSeconds(1)).has_value());
}

}  // namespace
}  // namespace optstate::supervisor
