#include "server/transport/shm/spin_policy.h"

#include "gtest/gtest.h"

namespace optstate::transport {
namespace {

v1::EngineSettings Settings(uint32_t spin_us, uint32_t workers) {
  v1::EngineSettings settings;
  settings.set_doorbell_spin_us(spin_us);
  settings.set_workers(workers);
  return settings;
}

TEST(SpinPolicyTest, SpinsWhileEverybodyHasACore) {
  SpinPolicy policy(Settings(50, 4), 8);
  EXPECT_EQ(policy.Spin(), absl::Microseconds(50));
  policy.AddSession();
  policy.AddSession();
  EXPECT_EQ(policy.Spin(), absl::Microseconds(50));
  policy.AddSession();
  EXPECT_EQ(policy.Spin(), absl::ZeroDuration());
  policy.RemoveSession();
  EXPECT_EQ(policy.Spin(), absl::Microseconds(50));
}

TEST(SpinPolicyTest, WorkersCountWhenTheirNumberWasChosen) {
  SpinPolicy automatic(Settings(50, 0), 2);
  automatic.AddSession();
  EXPECT_EQ(automatic.Spin(), absl::Microseconds(50));
  SpinPolicy chosen(Settings(50, 2), 2);
  chosen.AddSession();
  EXPECT_EQ(chosen.Spin(), absl::ZeroDuration());
}

TEST(SpinPolicyTest, IsBounded) {
  EXPECT_EQ(SpinPolicy(Settings(4'000'000'000, 0), 8).Spin(),
            absl::Milliseconds(1));
  EXPECT_EQ(SpinPolicy(Settings(0, 0), 8).Spin(), absl::ZeroDuration());
}

}  // namespace
}  // namespace optstate::transport
