// Tests a store on a disk that says that it has done what it has not, that goes
// away, or that is slow: no byte is ever wrong, and each error says where.

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/nvme_faults_fixture.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

class NvmeLyingDiskTest : public NvmeFaultsFixture {
 protected:
  // Returns how many records are damaged. The others have their bytes.
  int CountDamaged() {
    int damaged = 0;
    for (size_t i = 0; i < kRecordCount; ++i) {
      const absl::Status status = job_->Compare(i);
      if (status.ok()) continue;
      ++damaged;
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "/records")) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "at byte")) << status;
    }
    return damaged;
  }
  // Goes on after a power cut that loses all that was not synced.
  absl::Status RestoreWithoutUnsynced() {
    job_->Close();
    disk_->ClearFaults();
    cut_ = disk_->Crash([](const io::CrashSector&) { return 0; });
    job_->SetEngineMaker(
        [this] { return io::MakeSimulatedIoEngine(cut_.get()); });
    return job_->Restore();
  }

  std::unique_ptr<io::SimulatedDisk> cut_;
};

// The written record is missing where it belongs, and may lie over another.
TEST_F(NvmeLyingDiskTest, AMisdirectedWriteIsDamageAndNeverWrongBytes) {
  int found = 0;
  for (const bool is_durable : {false, true}) {
    for (uint64_t skip = 0; skip < kRecordCount; ++skip) {
      MakeDisk(UINT64_MAX);
      Start(is_durable);
      const uint64_t slots = is_durable ? 2 : 1;
      ReopenWith({.effect = Effect::kMisdirect,
                  .kind = Kind::kWrite,
                  .path = kRecords,
                  .skip = skip,
                  .bytes = layouts_.Uniform(0, kRecordCount / 2 * slots - 1) *
                           (is_durable ? kSlotBytes : kStateBytes)});
      // Records that are read meanwhile may be found damaged.
      for (size_t i = 0; i < kRecordCount; ++i) {
        const absl::Status written = job_->Write(i, &random_);
        EXPECT_TRUE(written.ok() || absl::IsDataLoss(written)) << written;
      }
      found += CountDamaged();
      job_->Close();
      ASSERT_EQ(job_->Open(), absl::OkStatus());
      found += CountDamaged();
      job_ = nullptr;
    }
  }
  std::cerr << found << " times a record was found damaged" << std::endl;
  EXPECT_GT(found, 0);
}

// Each commit is written and synced twice, so one lie about it costs nothing,
// and more of them a step. Records that are missing are damage.
TEST_F(NvmeLyingDiskTest, ALostSyncNeverGivesAWrongByte) {
  for (const std::string& path : {std::string(kCommits), std::string(kRecords),
                                  std::string("/disk2/records")}) {
    for (const uint64_t times : {uint64_t{1}, kForever}) {
      SCOPED_TRACE(path);
      MakeDisk(UINT64_MAX);
      Start(/*is_durable=*/true);
      // Opening syncs both copies of the last commit.
      ReopenWith({.effect = Effect::kLostSync,
                  .kind = Kind::kSync,
                  .path = path,
                  .skip = path == kCommits ? uint64_t{kCommitCopies} : 0,
                  .times = times});
      WriteAll();
      Commit(3);
      const absl::Status restored = RestoreWithoutUnsynced();
      if (path == kCommits) {
        EXPECT_EQ(restored, absl::OkStatus());
        EXPECT_EQ(job_->store().durable_step(), times == 1 ? 3u : 2u);
        EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
      } else {
        EXPECT_TRUE(absl::IsDataLoss(restored)) << restored;
        EXPECT_TRUE(absl::StrContains(restored.message(), path)) << restored;
      }
      job_ = nullptr;
    }
  }
}

TEST_F(NvmeLyingDiskTest, ADeviceThatIsGoneIsNamedAndAllIsThereWhenItIsBack) {
  Start(/*is_durable=*/true);
  WriteAll();
  disk_->SetGone(true);
  absl::Status status;
  while (status.ok()) status = UseByThreads();
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsDataLoss(status))
      << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "/disk")) << status;
  job_->Close();
  // An engine that comes meanwhile changes nothing.
  const absl::Status opened = job_->Open();
  EXPECT_TRUE(absl::IsUnavailable(opened)) << opened;
  job_->Close();
  disk_->SetGone(false);
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  EXPECT_EQ(job_->store().durable_step(), 2u);
  WriteAll();
  Commit(3);
  ASSERT_EQ(job_->Restore(), absl::OkStatus());
  EXPECT_EQ(job_->store().durable_step(), 3u);
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

// Its time is simulated: a hundred times that of the other tests.
TEST_F(NvmeLyingDiskTest, ADiskAHundredTimesSlowerHasTheSameBytes) {
  disk_ = std::make_unique<io::SimulatedDisk>(
      io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT32_MAX),
                               .latency_us_min = 5'000,
                               .latency_us_max = 50'000,
                               .folders = {"/disk", "/disk2"}});
  Start(/*is_durable=*/true);
  EXPECT_EQ(UseByThreads(), absl::OkStatus());
  Commit(3);
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  ASSERT_EQ(job_->Restore(), absl::OkStatus());
  EXPECT_EQ(job_->store().durable_step(), 3u);
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

}  // namespace
}  // namespace optstate::nvme
