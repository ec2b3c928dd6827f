// Records that a sync which failed was for are written again by the next
// engine: several at once, in the frames that there are, and so that a kill or
// a power cut at any moment loses nothing.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

using Kind = io::SimulatedEvent::Kind;

constexpr size_t kRecordCount = 16;
constexpr uint64_t kFrames = 6;
constexpr char kRecords[] = "/disk/records";

bool IsOfRecords(const io::SimulatedEvent& event) {
  return event.path == kRecords || event.path == "/disk2/records";
}

class NvmeUnsyncedTest : public testing::Test {
 protected:
  NvmeUnsyncedTest() : random_(layouts_.Uniform(0, UINT32_MAX)) {}

  NvmeTestJob::Setup SetupOn(io::SimulatedDisk* disk) const {
    LayoutSpec spec;
    spec.groups.resize(1);
    spec.parameters = {{.name = "a",
                        .shape = {kRecordCount * kTileElements},
                        .numel = kRecordCount * kTileElements}};
    NvmeTestJob::Setup setup;
    setup.layout = *Layout::Make(std::move(spec));
    setup.sub_group_elements = kTileElements;
    setup.frames = kFrames;
    setup.directories = {"/disk", "/disk2"};
    setup.make_engine = [disk] { return io::MakeSimulatedIoEngine(disk); };
    return setup;
  }
  // Leaves a job whose steps 1 and 2 are durable, while the records of step 3
  // have been written, and one of the syncs for them has failed.
  void FailASync() {
    disk_ = std::make_unique<io::SimulatedDisk>(
        io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT32_MAX),
                                 .latency_us_min = 200,
                                 .latency_us_max = 500,
                                 .folders = {"/disk", "/disk2"}});
    job_ = std::make_unique<NvmeTestJob>(SetupOn(disk_.get()));
    ASSERT_EQ(job_->records(), kRecordCount);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    for (uint64_t step = 1; step <= 2; ++step) {
      ASSERT_NO_FATAL_FAILURE(WriteAll());
      ASSERT_EQ(job_->RequestCommit(step), absl::OkStatus());
      ASSERT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
    }
    io::SimulatedFault fault;
    fault.kind = io::IoRequest::Kind::kSync;
    fault.path = kRecords;
    disk_->AddFault(fault);
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_EQ(job_->RequestCommit(3), absl::OkStatus());
    const absl::Status failed = job_->store().AwaitCommit();
    ASSERT_TRUE(absl::IsDataLoss(failed)) << failed;
    job_->Close();
    disk_->ClearFaults();
    ASSERT_TRUE(IsSyncing());
  }
  void WriteAll() {
    for (size_t i = 0; i < kRecordCount; ++i) {
      ASSERT_EQ(job_->Write(i, &random_), absl::OkStatus());
    }
  }
  bool IsSyncing() { return FrameTable(job_->table().span()).is_syncing(); }
  // Makes the present step durable and cuts the power, which loses all that was
  // not synced: the step comes back.
  static absl::Status CheckCommits(NvmeTestJob* job, io::SimulatedDisk* disk) {
    absl::Status status = job->CompareAll();
    status.Update(job->RequestCommit(3));
    status.Update(job->store().AwaitCommit());
    job->Close();
    if (!status.ok()) return status;
    const auto cut = disk->Crash([](const io::CrashSector&) { return 0; });
    job->SetEngineMaker([&] { return io::MakeSimulatedIoEngine(cut.get()); });
    status = job->Restore();
    if (status.ok() && job->store().durable_step() != 3) {
      status = absl::InternalError("the step is lost");
    }
    if (status.ok()) status = job->CompareAll();
    job->Close();
    return status;
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  std::unique_ptr<io::SimulatedDisk> disk_;
  std::unique_ptr<NvmeTestJob> job_;
};

TEST_F(NvmeUnsyncedTest, SeveralAreWrittenAtOnceInTheFramesThatThereAre) {
  ASSERT_NO_FATAL_FAILURE(FailASync());
  int under_way = 0, most = 0, writes = 0;
  disk_->SetHook([&](const io::SimulatedEvent& event) {
    if (!IsOfRecords(event)) return;
    if (event.kind == Kind::kWriteBegun) {
      ++writes;
      most = std::max(most, ++under_way);
    }
    if (event.kind == Kind::kWriteEnded) --under_way;
  });
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  EXPECT_FALSE(IsSyncing());
  EXPECT_EQ(job_->store().durable_step(), 2u);
  EXPECT_EQ(job_->store().swap_state()->counters.records_read,
            kRecordCount - kFrames);
  job_->Close();  // ends the writes
  disk_->SetHook(nullptr);
  EXPECT_GT(most, 1);
  EXPECT_LE(most, static_cast<int>(kFrames));
  // Each record that is read needs the frame of one that is written first.
  EXPECT_GE(writes, static_cast<int>(kRecordCount - kFrames));
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  EXPECT_EQ(CheckCommits(job_.get(), disk_.get()), absl::OkStatus());
}

// The engine ends at each write of those that it writes again, and another one
// goes on. What a kill leaves of a write: nvme_crash_states_test.
TEST_F(NvmeUnsyncedTest, AnEngineThatEndsLeavesThemToTheNext) {
  uint64_t end = 0;
  while (!HasFailure()) {
    ASSERT_NO_FATAL_FAILURE(FailASync());
    ++end;
    uint64_t events = 0;
    disk_->SetHook([&](const io::SimulatedEvent& event) {
      if (IsOfRecords(event) && ++events == end) disk_->SetGone(true);
    });
    const absl::Status opened = job_->Open();
    const bool was_syncing = IsSyncing();
    job_->Close();
    disk_->SetHook(nullptr);
    disk_->SetGone(false);
    if (!opened.ok()) {
      EXPECT_TRUE(absl::IsUnavailable(opened)) << end << ": " << opened;
      EXPECT_TRUE(was_syncing) << end;
    }
    ASSERT_EQ(job_->Open(), absl::OkStatus()) << end;
    EXPECT_FALSE(IsSyncing());
    EXPECT_EQ(CheckCommits(job_.get(), disk_.get()), absl::OkStatus()) << end;
    if (opened.ok()) break;
  }
  EXPECT_GT(end, kRecordCount - kFrames);
}

// The power is cut at each write: the last commit stands.
TEST_F(NvmeUnsyncedTest, APowerCutGoesBackToTheLastCommit) {
  ASSERT_NO_FATAL_FAILURE(FailASync());
  uint64_t cuts = 0;
  disk_->SetHook([&](const io::SimulatedEvent& event) {
    if (!IsOfRecords(event) || HasFailure()) return;
    const auto disk = disk_->CrashAtRandom(++cuts);
    NvmeTestJob job(SetupOn(disk.get()));
    job.CopyCommitsOf(job_.get());
    ASSERT_EQ(job.Restore(), absl::OkStatus()) << cuts;
    EXPECT_EQ(job.store().durable_step(), 2u);
    EXPECT_EQ(job.CompareAll(), absl::OkStatus()) << cuts;
  });
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  disk_->SetHook(nullptr);
  EXPECT_GT(cuts, kRecordCount - kFrames);
}

// A record that cannot be read or written ends the opening with its error, and
// is written by an engine that can.
TEST_F(NvmeUnsyncedTest, AnErrorLeavesThemToTheNextEngine) {
  for (const auto kind :
       {io::IoRequest::Kind::kRead, io::IoRequest::Kind::kWrite}) {
    ASSERT_NO_FATAL_FAILURE(FailASync());
    io::SimulatedFault fault;
    fault.kind = kind;
    fault.path = kRecords;
    fault.times = io::SimulatedFault::kForever;
    disk_->AddFault(fault);
    const absl::Status failed = job_->Open();
    EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
    EXPECT_NE(failed.message().find(kRecords), std::string::npos) << failed;
    EXPECT_TRUE(IsSyncing());
    disk_->ClearFaults();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    EXPECT_FALSE(IsSyncing());
    EXPECT_EQ(CheckCommits(job_.get(), disk_.get()), absl::OkStatus());
  }
}

}  // namespace
}  // namespace optstate::nvme
