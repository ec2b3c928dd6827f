#include "server/scheduler/workers/memory_bandwidth_record.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "gtest/gtest.h"

namespace optstate::scheduler {
namespace {

constexpr std::chrono::milliseconds kAtOnce{0};

class MemoryBandwidthRecordTest : public testing::Test {
 protected:
  MemoryBandwidthRecordTest() { std::filesystem::create_directories(dir_); }
  ~MemoryBandwidthRecordTest() override { std::filesystem::remove_all(dir_); }

  // Runs the meter until there is a record, if it is `expected` to measure.
  void Measure(int workers, bool expected) {
    const MemoryBandwidthMeter meter(
        dir_, workers,
        [this](int n, const std::atomic<bool>&) {
          ++measured_;
          return 1e9 * n + 0.5;
        },
        kAtOnce);
    while (expected && RecordedMemoryBandwidth(dir_) != 1e9 * workers + 0.5) {
      std::this_thread::yield();
    }
  }

  const std::string dir_ =
      testing::TempDir() + "/bandwidth." + std::to_string(::getpid());
  std::atomic<int> measured_{0};
};

TEST_F(MemoryBandwidthRecordTest, OnceForANumberOfWorkers) {
  EXPECT_EQ(RecordedMemoryBandwidth(dir_), 0);
  Measure(2, true);
  EXPECT_EQ(RecordedMemoryBandwidth(dir_), 2e9 + 0.5);
  Measure(2, false);
  EXPECT_EQ(measured_, 1);
  Measure(3, true);
  EXPECT_EQ(measured_, 2);
  EXPECT_EQ(RecordedMemoryBandwidth(dir_), 3e9 + 0.5);
}

TEST_F(MemoryBandwidthRecordTest, AReaderSeesTheNextRecord) {
  MemoryBandwidthReader reader(dir_);
  EXPECT_EQ(reader.bytes_per_s(), 0);
  Measure(2, true);
  EXPECT_EQ(reader.bytes_per_s(), 2e9 + 0.5);
  EXPECT_EQ(reader.bytes_per_s(), 2e9 + 0.5);
  Measure(3, true);
  EXPECT_EQ(reader.bytes_per_s(), 3e9 + 0.5);
  std::filesystem::remove_all(dir_);
  EXPECT_EQ(reader.bytes_per_s(), 0);
  std::filesystem::create_directories(dir_);
}

TEST_F(MemoryBandwidthRecordTest, GarbageIsNoRecord) {
  for (const char* text : {"", "x", "2", "2 x", "2 0", "2 -5"}) {
    std::ofstream(dir_ + "/memory_bandwidth") << text;
    EXPECT_EQ(RecordedMemoryBandwidth(dir_), 0) << text;
  }
  Measure(2, true);
  EXPECT_EQ(measured_, 1);
}

TEST_F(MemoryBandwidthRecordTest, ADaemonOfAMomentDoesNotBegin) {
  {
    const MemoryBandwidthMeter meter(dir_, 2,
                                     [this](int, const std::atomic<bool>&) {
                                       ++measured_;
                                       return 1.0;
                                     });
  }
  EXPECT_EQ(measured_, 0);
  EXPECT_EQ(RecordedMemoryBandwidth(dir_), 0);
}

TEST_F(MemoryBandwidthRecordTest, TheEndWaitsForNoMeasurement) {
  {
    const MemoryBandwidthMeter meter(
        dir_, 2,
        [](int, const std::atomic<bool>& stop) {
          while (!stop) std::this_thread::yield();
          return 0.0;
        },
        kAtOnce);
  }
  EXPECT_EQ(RecordedMemoryBandwidth(dir_), 0);
  EXPECT_TRUE(std::filesystem::is_empty(dir_));
}

}  // namespace
}  // namespace optstate::scheduler
