#include "server/scheduler/executors/device_load.h"

#include "gtest/gtest.h"

namespace optstate::scheduler {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;

TEST(DeviceLoadTest, TimeWithoutWorkDoesNotCount) {
  DeviceLoad load;
  EXPECT_EQ(load.Recent().ElementsPerSecond(), 0);
  load.Begin(10 * kSecondNs);
  load.End(12 * kSecondNs, 200, 1000);
  load.Begin(50 * kSecondNs);
  load.End(52 * kSecondNs, 200, 1000);
  load.EndPass();
  EXPECT_EQ(load.Recent().ElementsPerSecond(), 100);
  EXPECT_EQ(load.Recent().CopiedBytesPerSecond(), 500);
}

TEST(DeviceLoadTest, TimeWithTwoBatchesCountsOnce) {
  DeviceLoad load;
  load.Begin(0);
  load.Begin(kSecondNs);
  load.End(2 * kSecondNs, 100, 0);
  load.Begin(2 * kSecondNs);
  load.End(3 * kSecondNs, 100, 0);
  load.End(4 * kSecondNs, 100, 0);
  load.EndPass();
  EXPECT_EQ(load.Recent().ElementsPerSecond(), 75);
}

TEST(DeviceLoadTest, OldPassesAndThoseWithoutWorkAreForgotten) {
  DeviceLoad load;
  for (size_t pass = 0; pass < 2 * DeviceLoad::kPasses; ++pass) {
    const uint64_t elements = pass < DeviceLoad::kPasses ? 1 : 8;
    load.Begin(0);
    load.End(kSecondNs, elements, 0);
    load.EndPass();
    load.EndPass();
  }
  EXPECT_EQ(load.Recent().elements, 8 * DeviceLoad::kPasses);
  EXPECT_EQ(load.Recent().ElementsPerSecond(), 8);
}

// A batch that failed took time, of which the next pass need not know.
TEST(DeviceLoadTest, ABatchThatFailedTakesTime) {
  DeviceLoad load;
  load.Begin(0);
  load.End(kSecondNs, 0, 0);
  load.Begin(kSecondNs);
  load.End(2 * kSecondNs, 100, 0);
  load.EndPass();
  EXPECT_EQ(load.Recent().ElementsPerSecond(), 50);
}

}  // namespace
}  // namespace optstate::scheduler
