// Records that are given all their values anew, without being read.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

const char kRecords[] = "/disk/records";
constexpr size_t kRecordCount = 12;
// A record of 4096 AdamW elements: two arrays of floats.
constexpr uint64_t kStateBytes = 2 * 4096 * 4;
constexpr uint64_t kSlotBytes = kStateBytes;

class NvmeOverwriteTest : public testing::Test {
 protected:
  NvmeOverwriteTest() : random_(layouts_.Uniform(0, UINT32_MAX)) {}

  // Makes a job of which every record has been written, and is on disk but for
  // a few.
  void Start() {
    job_ = nullptr;
    disk_ = std::make_unique<io::SimulatedDisk>(
        io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT32_MAX),
                                 .latency_us_max = 500,
                                 .folders = {"/disk"}});
    LayoutSpec spec;
    spec.groups.resize(1);
    ParameterSpec parameter;
    parameter.name = "a";
    parameter.numel = kRecordCount * kTileElements;
    parameter.shape = {parameter.numel};
    spec.parameters = {parameter};
    NvmeTestJob::Setup setup;
    setup.layout = *Layout::Make(std::move(spec));
    setup.sub_group_elements = kTileElements;
    setup.is_durable = false;
    setup.make_engine = [this] {
      return io::MakeSimulatedIoEngine(disk_.get());
    };
    job_ = std::make_unique<NvmeTestJob>(std::move(setup));
    ASSERT_EQ(job_->records(), kRecordCount);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    for (size_t i = 0; i < kRecordCount; ++i) {
      ASSERT_EQ(job_->Write(i, &random_), absl::OkStatus());
    }
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
  }

  // Gives record 0 new values, and compares them.
  void Overwrite() {
    const auto pin =
        job_->store().PinSubGroup(0, storage::StateStore::Access::kOverwrite);
    ASSERT_TRUE(pin.ok()) << pin.status();
    for (const int part : {storage::kStatePart0, storage::kStatePart0 + 1}) {
      ASSERT_EQ(pin->record().part(part).size(), kStateBytes / 2);
      for (const std::byte byte : pin->record().part(part)) {
        EXPECT_EQ(byte, std::byte{0});
      }
    }
    for (const auto bytes : KeptPieces(job_->layout(), pin->record())) {
      std::fill(bytes.begin(), bytes.end(), kNew);
    }
  }
  void ExpectOverwritten() {
    const auto pin =
        job_->store().PinSubGroup(0, storage::StateStore::Access::kRead);
    ASSERT_TRUE(pin.ok()) << pin.status();
    for (const auto bytes : KeptPieces(job_->layout(), pin->record())) {
      for (const std::byte byte : bytes) EXPECT_EQ(byte, kNew);
    }
  }
  void CompareOthers() {
    for (size_t i = 1; i < kRecordCount; ++i) {
      ASSERT_EQ(job_->Compare(i), absl::OkStatus());
    }
  }

  static constexpr std::byte kNew{0x5a};
  RandomLayouts layouts_;
  std::mt19937_64 random_;
  std::unique_ptr<io::SimulatedDisk> disk_;
  std::unique_ptr<NvmeTestJob> job_;
};

// Nothing is read for a record that is overwritten; what a pass has read ahead,
// or could not read, does not count.
TEST_F(NvmeOverwriteTest, ADamagedRecordIsOverwritten) {
  for (const bool is_ahead : {false, true}) {
    for (const bool cannot_be_read : {false, true}) {
      Start();
      for (size_t i : {1, 3, 5}) ASSERT_EQ(job_->Compare(i), absl::OkStatus());
      job_->Close();
      disk_->Flip(kRecords, 0, std::byte{1});
      if (cannot_be_read) {
        disk_->AddFault({.kind = io::IoRequest::Kind::kRead,
                         .path = kRecords,
                         .end = kSlotBytes,
                         .times = io::SimulatedFault::kForever});
      }
      ASSERT_EQ(job_->Open(), absl::OkStatus());
      std::vector<uint8_t> wanted(kRecordCount);
      wanted[0] = is_ahead ? 1 : 0;
      ASSERT_TRUE(job_->store().BeginPass(wanted).ok());
      ASSERT_NO_FATAL_FAILURE(Overwrite());
      disk_->ClearFaults();
      ASSERT_NO_FATAL_FAILURE(CompareOthers());
      ASSERT_NO_FATAL_FAILURE(ExpectOverwritten());
    }
  }
}

// A frame has the record as it was until others drive it out; only then is the
// damage found, by a thread that wants to change a part of the record.
TEST_F(NvmeOverwriteTest, ARecordThatIsFoundDamagedIsOverwritten) {
  Start();
  ASSERT_EQ(job_->Compare(0), absl::OkStatus());
  disk_->Flip(kRecords, 0, std::byte{1});
  using Access = storage::StateStore::Access;
  EXPECT_TRUE(job_->store().PinSubGroup(0, Access::kRead).ok());
  ASSERT_NO_FATAL_FAILURE(CompareOthers());
  EXPECT_TRUE(
      absl::IsDataLoss(job_->store().PinSubGroup(0, Access::kWrite).status()));
  ASSERT_NO_FATAL_FAILURE(Overwrite());
  ASSERT_NO_FATAL_FAILURE(CompareOthers());
  ASSERT_NO_FATAL_FAILURE(ExpectOverwritten());
}

}  // namespace
}  // namespace optstate::nvme
