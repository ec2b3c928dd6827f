// Jobs whose records lie on a device, for which a file stands.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "server/session/testing/disk_job_fixture.h"
#include "storage/block_device/device.h"
#include "storage/block_device/device_format.h"
#include "storage/disk_folder.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class JobDeviceTest : public DiskJobFixture {
 protected:
  void StartOnDevice(v1::DurabilityKind durability) {
    JobHarness::Setup setup = DiskJobSetup(v1::PLACEMENT_NVME, durability);
    setup.has_device = true;
    Start(setup);
    state_ = job_->StateBytes();
  }
  std::string Folder() const { return job_->disk() + "/jobs/test"; }
  // Opens the job again, which must go well, and compares its state.
  void ExpectGoesOn() {
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    job_->AttachAll();
    EXPECT_EQ(job_->StateBytes(), state_);
  }
  // Opens the job again, which must be refused; returns the reason.
  std::string Refusal(absl::StatusCode code) {
    const absl::Status status = job_->Open();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }

  std::string state_;
};

TEST_F(JobDeviceTest, TheFolderHasTheSmallFilesAlone) {
  StartOnDevice(v1::DURABILITY_KIND_STEP);
  EXPECT_TRUE(fs::exists(Folder() + "/commits"));
  EXPECT_TRUE(fs::exists(Folder() + "/extent"));
  EXPECT_FALSE(fs::exists(Folder() + "/records"));
  EXPECT_EQ(job_->job().Describe().disk().directories(0),
            Folder() + ", records on " + job_->device());
  EXPECT_TRUE(
      storage::IsDiskFolderInUse(Folder(), job_->directory(), job_->device()))
      << "its engine has the extent";
  job_->Close();
  EXPECT_FALSE(
      storage::IsDiskFolderInUse(Folder(), job_->directory(), job_->device()));
  ExpectGoesOn();
}

TEST_F(JobDeviceTest, AJobThatWasNotDurableLeavesRoomForTheNext) {
  StartOnDevice(v1::DURABILITY_KIND_NONE);
  const auto former = *storage::ReadDiskExtent(Folder());
  ASSERT_TRUE(former.has_value());
  job_->Close();
  job_->DropMemory();
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  job_->Start(job_->RandomTensors(kSeed));
  EXPECT_EQ(*storage::ReadDiskExtent(Folder()), former);
}

TEST_F(JobDeviceTest, AJobThatHadFilesKeepsThem) {
  Start();
  state_ = job_->StateBytes();
  job_->Close();
  std::ofstream(job_->device()).flush();
  fs::resize_file(job_->device(), 16 << 20);
  ASSERT_TRUE(storage::FormatDevice(job_->disk(), job_->device(), false).ok());
  job_->setup().has_device = true;
  ExpectGoesOn();
  EXPECT_TRUE(fs::exists(Folder() + "/records"));
  EXPECT_FALSE(fs::exists(Folder() + "/extent"));
}

TEST_F(JobDeviceTest, WithoutItsDeviceNothingIsChanged) {
  StartOnDevice(v1::DURABILITY_KIND_STEP);
  job_->Close();
  job_->setup().has_device = false;
  EXPECT_THAT(Refusal(absl::StatusCode::kFailedPrecondition),
              HasSubstr("has no device: start optstated with --nvme-dir"));
  job_->setup().has_device = true;
  fs::rename(job_->device(), job_->device() + "-aside");
  EXPECT_THAT(Refusal(absl::StatusCode::kFailedPrecondition),
              HasSubstr("is not there"));
  fs::copy_file(job_->device() + "-aside", job_->device());
  fs::resize_file(job_->device(), 1 << 20);
  EXPECT_THAT(Refusal(absl::StatusCode::kDataLoss), HasSubstr("has shrunk"));
  fs::rename(job_->device() + "-aside", job_->device());
  ExpectGoesOn();
}

TEST_F(JobDeviceTest, AnotherDeviceThanTheJobsIsRefused) {
  StartOnDevice(v1::DURABILITY_KIND_STEP);
  job_->Close();
  const std::string extent = Folder() + "/extent";
  const auto own = *storage::ReadDiskExtent(Folder());
  ASSERT_TRUE(own.has_value());
  auto other = *own;
  other.device_id[0] = other.device_id[0] == '0' ? '1' : '0';
  ASSERT_TRUE(storage::WriteDiskExtent(Folder(), other).ok());
  EXPECT_THAT(Refusal(absl::StatusCode::kFailedPrecondition),
              HasSubstr("the job's records are on device"));
  other = *own;
  other.extent.begin_bytes = 0;
  ASSERT_TRUE(storage::WriteDiskExtent(Folder(), other).ok());
  EXPECT_THAT(Refusal(absl::StatusCode::kDataLoss), HasSubstr("names bytes 0"));
  ASSERT_TRUE(storage::WriteDiskExtent(Folder(), *own).ok());
  ExpectGoesOn();
}

TEST_F(JobDeviceTest, ADeviceWithoutRoomRefusesTheJobAndHasNothingOfIt) {
  JobHarness::Setup setup =
      DiskJobSetup(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_NONE);
  setup.has_device = true;
  // 64 MiB of parameters alone.
  setup.layout.parameters = {MakeParameter("a", 16 << 20)};
  job_ = std::make_unique<JobHarness>(setup);
  const absl::Status status = job_->Register(0).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("delete a job"));
  EXPECT_FALSE(fs::exists(Folder()));
}

}  // namespace
}  // namespace optstate::session
