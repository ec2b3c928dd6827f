#include "storage/io/disk_bandwidth.h"

#include <stdlib.h>
#include <sys/mount.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/io/make_io_engine.h"
#include "storage/testing/test_mounts.h"

namespace optstate::io {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kRequest = 8192;

// Notes the requests; ends writes from one on with an error.
class NotingHook : public IoHook {
 public:
  int64_t OnEnd(const IoRequest& request, int64_t result) override {
    if (request.kind == IoRequest::Kind::kWrite) {
      std::this_thread::sleep_for(write_time);
    }
    const std::scoped_lock lock(mutex);
    if (request.kind == IoRequest::Kind::kWrite) {
      written.insert(request.offset_bytes);
      return ++writes >= first_bad_write ? -EIO : result;
    }
    if (request.kind == IoRequest::Kind::kRead) {
      ++reads;
      unwritten_reads += written.contains(request.offset_bytes) ? 0 : 1;
    }
    return result;
  }

  std::mutex mutex;
  std::set<uint64_t> written;
  int writes = 0;
  int reads = 0;
  int unwritten_reads = 0;
  int first_bad_write = 1 << 30;
  std::chrono::milliseconds write_time{0};
};

class DiskBandwidthTest : public testing::TestWithParam<IoEngineKind> {
 protected:
  DiskBandwidthTest() : directory_(testing::TempDir() + "/bandwidth-XXXXXX") {
    if (::mkdtemp(directory_.data()) == nullptr) std::abort();
    IoEngineOptions options;
    options.hook = &hook_;
    auto made = MakeIoEngine(GetParam(), options);
    if (made.ok()) engine_ = std::move(made->engine);
  }
  ~DiskBandwidthTest() override { std::filesystem::remove_all(directory_); }

  void SetUp() override {
    if (engine_ == nullptr) GTEST_SKIP() << "no such engine here";
  }

  absl::StatusOr<DiskBandwidth> Measure(uint64_t file_bytes_max = 1 << 20) {
    return MeasureDiskBandwidth(engine_.get(), directory_,
                                {.request_bytes = kRequest - 1,
                                 .requests = 4,
                                 .file_bytes_max = file_bytes_max,
                                 .phase_time = absl::Milliseconds(20)});
  }

  NotingHook hook_;
  std::string directory_;
  std::unique_ptr<IoEngine> engine_;
};

TEST_P(DiskBandwidthTest, MeasuresAndLeavesNothing) {
  // As left by a process that was killed when it had made the file.
  std::ofstream(directory_ + "/.bandwidth") << "left";
  const auto measured = Measure();
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_GT(measured->read_bytes_per_s, 0);
  EXPECT_GT(measured->write_bytes_per_s, 0);
  EXPECT_GT(measured->mixed_bytes_per_s, 0);
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
  EXPECT_EQ(engine_->in_flight(), 0u);
  EXPECT_TRUE(Measure().ok());
}

// Reading what was never written would not reach the disk.
TEST_P(DiskBandwidthTest, WhatASlowDiskDidNotWriteInTimeIsNotRead) {
  hook_.write_time = std::chrono::milliseconds(5);
  const auto measured = Measure(/*file_bytes_max=*/4 << 20);
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_LT(hook_.written.size(), (4 << 20) / kRequest);
  EXPECT_GT(hook_.reads, 0);
  EXPECT_EQ(hook_.unwritten_reads, 0);
}

// A file stands for the device.
TEST_P(DiskBandwidthTest, APartOfADeviceIsMeasuredAndTheRestKept) {
  const DiskBandwidthOptions options = {.request_bytes = kRequest,
                                        .requests = 4,
                                        .file_bytes_max = 1 << 20,
                                        .phase_time = absl::Milliseconds(20)};
  const uint64_t bytes = DeviceBandwidthBytesMin(options);
  EXPECT_EQ(bytes, 2 * 4 * kRequest);
  const std::string device = directory_ + "/device";
  std::ofstream(device) << std::string(4 * bytes, 'x');
  const Extent part = {bytes, bytes + kRequest};
  const auto measured =
      MeasureDeviceBandwidth(engine_.get(), device, part, options);
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_GT(measured->read_bytes_per_s, 0);
  EXPECT_GT(measured->write_bytes_per_s, 0);
  EXPECT_GT(measured->mixed_bytes_per_s, 0);
  std::ifstream file(device);
  const std::string after{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(after.substr(0, bytes), std::string(bytes, 'x'));
  EXPECT_NE(after.substr(bytes, bytes), std::string(bytes, 'x'));
  EXPECT_EQ(after.substr(2 * bytes), std::string(2 * bytes, 'x'));
  const absl::Status refused =
      MeasureDeviceBandwidth(engine_.get(), device, {bytes, bytes - kRequest},
                             options)
          .status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
}

TEST_P(DiskBandwidthTest, AnErrorOfTheDiskIsSaid) {
  hook_.first_bad_write = 3;
  const auto measured = Measure();
  EXPECT_EQ(measured.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(measured.status().message(), HasSubstr(directory_));
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
  EXPECT_EQ(engine_->in_flight(), 0u);
}

TEST_P(DiskBandwidthTest, ADirectoryThatIsNotThereIsNamed) {
  std::filesystem::remove(directory_);
  const auto measured = Measure();
  EXPECT_TRUE(absl::IsNotFound(measured.status())) << measured.status();
  EXPECT_THAT(measured.status().message(), HasSubstr(directory_));
}

TEST_P(DiskBandwidthTest, ADiskThatIsReadOnlyOrFullIsSaid) {
  const absl::Status may = storage::EnterPrivateMounts();
  if (absl::IsFailedPrecondition(may)) GTEST_SKIP() << may.message();
  ASSERT_TRUE(may.ok()) << may;
  const auto mounted = storage::TestTmpfs::Mount(directory_, "size=256k");
  ASSERT_TRUE(mounted.ok()) << mounted.status();
  // An eighth of it has no room for two rounds of requests.
  const auto measured = Measure();
  EXPECT_TRUE(absl::IsResourceExhausted(measured.status()))
      << measured.status();
  EXPECT_THAT(measured.status().message(), HasSubstr("a file of 65536 bytes"));
  ASSERT_EQ(::mount(nullptr, directory_.c_str(), nullptr,
                    MS_REMOUNT | MS_RDONLY, "size=16m"),
            0);
  const auto refused = Measure();
  EXPECT_TRUE(absl::IsUnavailable(refused.status())) << refused.status();
}

INSTANTIATE_TEST_SUITE_P(Engines, DiskBandwidthTest,
                         testing::Values(IoEngineKind::kIoUring,
                                         IoEngineKind::kBlocking),
                         [](const auto& engine) {
                           return engine.param == IoEngineKind::kBlocking
                                      ? "Blocking"
                                      : "IoUring";
                         });

}  // namespace
}  // namespace optstate::io
