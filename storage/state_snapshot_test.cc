#include "storage/state_snapshot.h"

#include <stdlib.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "proto/types/layout.h"
#include "storage/host_tier.h"

namespace optstate::storage {
namespace {

namespace fs = std::filesystem;

class StateSnapshotTest : public ::testing::Test {
 protected:
  StateSnapshotTest() {
    std::string name = ::testing::TempDir() + "/state_snapshot-XXXXXX";
    directory_ = ::mkdtemp(name.data());
  }
  ~StateSnapshotTest() override { fs::remove_all(directory_); }

  // Makes a job that has taken seven steps, and stays mapped.
  void MakeJob() {
    LayoutSpec spec;
    spec.groups.resize(1);
    spec.parameters.resize(1);
    spec.parameters[0].name = "p";
    spec.parameters[0].shape = {3};
    spec.parameters[0].numel = 3;
    auto tier = HostTier::Create(directory_, *Layout::Make(std::move(spec)),
                                 Accumulation(), "what it is");
    ASSERT_TRUE(tier.ok()) << tier.status();
    tier_ = *std::move(tier);
    tier_->control()->steps_recovered = 2;
    tier_->control()->runs_rolled_back = 3;
    StepRecord record = CurrentRecord(*tier_->control());
    record.committed_step = 7;
    PublishRecord(record, tier_->control());
  }

  void ExpectDataLoss(const std::string& what) const {
    const absl::Status status = ReadStateSnapshot(directory_).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
  }

  std::string directory_;
  std::optional<HostTier> tier_;
};

TEST_F(StateSnapshotTest, SaysWhatTheEngineWroteLast) {
  MakeJob();
  fs::create_directory(directory_ + "/state.tmp");
  const auto snapshot = ReadStateSnapshot(directory_);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->description.payload, "what it is");
  EXPECT_EQ(snapshot->record.committed_step, 7u);
  EXPECT_EQ(snapshot->created_at_ns, tier_->control()->created_at_ns);
  EXPECT_EQ(snapshot->steps_recovered, 2u);
  EXPECT_EQ(snapshot->runs_rolled_back, 3u);
  // The folder stays: an engine may be about to finish it.
  EXPECT_TRUE(fs::exists(directory_ + "/state.tmp"));
}

// An engine that publishes as fast as it can, throughout.
TEST_F(StateSnapshotTest, IsReadWhileTheEnginePublishes) {
  MakeJob();
  std::atomic<bool> stop{false};
  std::thread engine([&] {
    StepRecord record = CurrentRecord(*tier_->control());
    while (!stop.load()) {
      ++record.committed_step;
      record.update_ns = record.committed_step;
      PublishRecord(record, tier_->control());
    }
  });
  for (int i = 0; i < 20000; ++i) {
    const auto snapshot = ReadStateSnapshot(directory_);
    EXPECT_TRUE(snapshot.ok()) << "read " << i << ": " << snapshot.status();
    if (!snapshot.ok()) break;
    if (snapshot->record.committed_step == 7) continue;  // the first
    EXPECT_EQ(snapshot->record.update_ns, snapshot->record.committed_step);
  }
  stop.store(true);
  engine.join();
}

TEST_F(StateSnapshotTest, NoJobIsNotADamagedOne) {
  EXPECT_TRUE(absl::IsNotFound(ReadStateSnapshot(directory_).status()));
  MakeJob();
  tier_->control()->records[0].committed_step ^= 1;
  tier_->control()->records[1].committed_step ^= 1;
  ExpectDataLoss("/state/control: the current step record's checksum");
  fs::resize_file(directory_ + "/state/control", 100);
  ExpectDataLoss("/state/control: is missing or has less than 4096 bytes");
  fs::remove(directory_ + "/state/job.binpb");
  ExpectDataLoss("/state/job.binpb is missing");
}

}  // namespace
}  // namespace optstate::storage
