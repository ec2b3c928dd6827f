#include "server/scheduler/workers/memory_bandwidth.h"

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "server/scheduler/workers/available_cores.h"

namespace optstate::scheduler {
namespace {

const std::atomic<bool> go_on{false};

// The bandwidth lies between the least and more than the most of any machine; a
// busy one has less, so the bounds are wide.
TEST(MemoryBandwidthTest, IsPlausible) {
  const auto begin = std::chrono::steady_clock::now();
  const double bandwidth = MeasureMemoryBandwidth(AvailableCores(), go_on);
  const auto elapsed = std::chrono::steady_clock::now() - begin;
  RecordProperty("bytes_per_s", std::to_string(bandwidth));
  RecordProperty(
      "ms", static_cast<int>(
                std::chrono::duration_cast<std::chrono::milliseconds>(elapsed)
                    .count()));
  EXPECT_GT(bandwidth, 1e8);
  EXPECT_LT(bandwidth, 1e13);
}

TEST(MemoryBandwidthTest, StopsWhenItIsToldTo) {
  const std::atomic<bool> stop{true};
  EXPECT_EQ(MeasureMemoryBandwidth(2, stop), 0);
}

// A container's limit may leave no more than its jobs need.
TEST(MemoryBandwidthTest, TakesAQuarterOfWhatIsLeftAtMost) {
  const size_t bytes = MemoryBandwidthBytes(2, UINT64_MAX);
  EXPECT_GE(bytes, size_t{64} << 20);
  EXPECT_LE(bytes, size_t{1} << 30);
  EXPECT_EQ(MemoryBandwidthBytes(2, 4 * bytes), bytes);
  EXPECT_EQ(MemoryBandwidthBytes(2, 4 * bytes - 1), 0u);
}

TEST(MemoryBandwidthTest, NoMemoryIsNoAnswer) {
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  // The limit covers mapped memory and small allocations.
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit none = {pages * 4096 + (rlim_t{32} << 20), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &none), 0);
  const double bandwidth = MeasureMemoryBandwidth(1, go_on);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_EQ(bandwidth, 0);
}

}  // namespace
}  // namespace optstate::scheduler
