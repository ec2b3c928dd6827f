// Stores whose records lie on a device.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

using ::testing::HasSubstr;
using Kind = io::IoRequest::Kind;

constexpr size_t kRecordCount = 6;
constexpr uint64_t kElements = kTileElements;
constexpr uint64_t kSlotBytes = 3 * kElements * 4;  // of AdamW
constexpr uint64_t kDeviceBytes = uint64_t{4} << 20;
constexpr uint64_t kFirstBegin = uint64_t{1} << 20;
constexpr uint64_t kSecondBegin = uint64_t{2} << 20;
const char kDevice[] = "/dev/simulated";

class NvmeDeviceTest : public testing::Test {
 protected:
  NvmeDeviceTest()
      : disk_({.latency_us_max = 500, .folders = {"/dev", "/a", "/b"}}) {
    const auto engine = io::MakeSimulatedIoEngine(&disk_);
    const auto file =
        engine->Open(kDevice, kDeviceBytes, io::IoEngine::OpenMode::kCreate);
    EXPECT_TRUE(file.ok()) << file.status();
  }

  std::unique_ptr<NvmeTestJob> MakeJob(const std::string& directory,
                                       uint64_t begin) {
    LayoutSpec spec;
    spec.groups.resize(1);
    ParameterSpec parameter;
    parameter.name = "weight";
    parameter.numel = kRecordCount * kElements;
    parameter.shape = {parameter.numel};
    spec.parameters.push_back(parameter);
    NvmeTestJob::Setup setup;
    setup.layout = *Layout::Make(std::move(spec));
    setup.sub_group_elements = kElements;
    setup.directories = {directory};
    setup.make_engine = [this] { return io::MakeSimulatedIoEngine(&disk_); };
    setup.device = kDevice;
    setup.device_begin = begin;
    auto job = std::make_unique<NvmeTestJob>(std::move(setup));
    EXPECT_EQ(job->sizes().records_by_directory,
              (std::vector<uint64_t>{2 * kRecordCount * kSlotBytes}));
    return job;
  }
  void WriteAndCommit(NvmeTestJob* job, uint64_t step) {
    for (size_t i = 0; i < kRecordCount; ++i) {
      ASSERT_EQ(job->Write(i, &random_), absl::OkStatus());
    }
    ASSERT_EQ(job->RequestCommit(step), absl::OkStatus());
    ASSERT_EQ(job->store().AwaitCommit(), absl::OkStatus());
  }

  std::mt19937_64 random_;
  io::SimulatedDisk disk_;
};

TEST_F(NvmeDeviceTest, JobsOnOneDeviceLeaveEachOtherAlone) {
  const auto first = MakeJob("/a", kFirstBegin);
  const auto second = MakeJob("/b", kSecondBegin);
  ASSERT_EQ(first->Open(), absl::OkStatus());
  ASSERT_EQ(second->Open(), absl::OkStatus());
  EXPECT_FALSE(disk_.Exists("/a/records"));
  for (uint64_t step = 1; step <= 3; ++step) {
    WriteAndCommit(first.get(), step);
    WriteAndCommit(second.get(), step);
  }
  const auto outside = disk_.Read(kDevice, 0, kFirstBegin);
  EXPECT_EQ(outside, std::vector<std::byte>(kFirstBegin));
  for (NvmeTestJob* job : {first.get(), second.get()}) {
    EXPECT_EQ(job->Restore(), absl::OkStatus());
    EXPECT_EQ(job->CompareAll(), absl::OkStatus());
  }
}

TEST_F(NvmeDeviceTest, ADamageNamesTheDeviceAndWhereItIs) {
  const auto job = MakeJob("/a", kFirstBegin);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  WriteAndCommit(job.get(), 1);
  job->Close();
  // The first commit is in slot 0 or 1 of each record.
  for (const uint64_t slot : {0, 1}) {
    disk_.Flip(kDevice, kFirstBegin + (2 * 3 + slot) * kSlotBytes + 100,
               std::byte{1});
  }
  ASSERT_EQ(job->Open(), absl::OkStatus());
  const auto found =
      job->store().Verify([](const storage::VerifyResult&) { return true; });
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->damages.size(), 1u);
  EXPECT_EQ(found->damages[0].file, kDevice);
  EXPECT_GE(found->damages[0].offset_bytes, kFirstBegin + 6 * kSlotBytes);
  EXPECT_LT(found->damages[0].offset_bytes, kFirstBegin + 8 * kSlotBytes);
}

TEST_F(NvmeDeviceTest, AnErrorOfTheDeviceNamesItAndTheOffset) {
  const auto job = MakeJob("/a", kFirstBegin);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  disk_.AddFault({.kind = Kind::kWrite, .path = kDevice, .error_number = EIO});
  ASSERT_EQ(job->Write(0, &random_), absl::OkStatus());
  ASSERT_EQ(job->RequestCommit(1), absl::OkStatus());
  const absl::Status failed = job->store().AwaitCommit();
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  EXPECT_THAT(std::string(failed.message()),
              testing::ContainsRegex("at 1[0-9]{6} of /dev/simulated"));
}

TEST_F(NvmeDeviceTest, AnExtentThatIsLockedMissingOrTooShort) {
  const auto job = MakeJob("/a", kFirstBegin);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  const auto other = MakeJob("/b", kFirstBegin + kSlotBytes);
  EXPECT_TRUE(absl::IsUnavailable(other->Open())) << "a part is the other's";
  EXPECT_FALSE(disk_.Exists("/b/commits")) << "nothing is left";
  EXPECT_FALSE(disk_.Exists("/b/records"));
  job->Close();

  auto options = [&] {
    NvmeStore::Options of;
    of.engine = io::MakeSimulatedIoEngine(&disk_);
    of.directories = {"/a"};
    of.frames = job->frames().span();
    of.table = job->table().span();
    of.incarnation = NvmeTestJob::kIncarnation;
    of.is_durable = true;
    of.job_bytes = 2000;
    return of;
  }();
  io::Extent extent = job->extents()[0].extent;
  extent.bytes -= io::kSectorBytes;
  options.extents = {{kDevice, extent}};
  const absl::Status status =
      NvmeStore::Open(&job->layout(), kElements, {}, std::move(options))
          .status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the job's extent of /dev/simulated has"));

  disk_.Truncate(kDevice, kSecondBegin - io::kSectorBytes);
  EXPECT_TRUE(absl::IsDataLoss(MakeJob("/b", kSecondBegin)->Open()));
  disk_.LoseFile(kDevice);
  EXPECT_TRUE(absl::IsDataLoss(job->Open())) << "its records are missing";
}

}  // namespace
}  // namespace optstate::nvme
