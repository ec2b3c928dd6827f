// Changing the number of frames of a store that is in use.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/persist_in_order.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

constexpr uint64_t kRecords = 10;

class NvmeFramesTest : public testing::Test {
 protected:
  NvmeFramesTest() : random_(layouts_.Uniform(0, UINT32_MAX)) {
    LayoutSpec spec;
    spec.groups.resize(1);
    spec.parameters = {{.name = "a",
                        .shape = {kRecords * kTileElements},
                        .numel = kRecords * kTileElements}};
    NvmeTestJob::Setup setup;
    setup.layout = *Layout::Make(std::move(spec));
    setup.sub_group_elements = kTileElements;
    setup.frames = kRecords;
    setup.is_durable = false;
    setup.make_engine = [this] { return io::MakeSimulatedIoEngine(&disk_); };
    job_ = std::make_unique<NvmeTestJob>(std::move(setup));
    EXPECT_EQ(job_->Open(), absl::OkStatus());
    Update();
  }

  void Update() {
    const std::vector<uint8_t> all(kRecords, 1);
    const auto positions = job_->store().BeginPass(all);
    ASSERT_TRUE(positions.ok()) << positions.status();
    for (size_t i = 0; i < *positions; ++i) {
      const auto pin = job_->store().PinOfPass(i);
      ASSERT_TRUE(pin.ok()) << pin.status();
      job_->WriteTo(*pin, &random_);
    }
  }

  // Returns the most records that a job's store had to write while `work` was
  // done. Nothing is read or written when that begins.
  static uint64_t MostToWrite(io::SimulatedDisk* disk, NvmeTestJob* job,
                              const std::function<void()>& work) {
    std::atomic<uint64_t> most = 0;
    // On the thread of I/O, which does not hold the store's lock then.
    disk->SetHook([&](const io::SimulatedEvent& event) {
      if (event.kind != io::SimulatedEvent::Kind::kWriteBegun) return;
      most = std::max(most.load(), job->store().swap_state()->records_to_write);
    });
    work();
    EXPECT_EQ(job->store().swap_state()->records_to_write, 0u);
    disk->SetHook(nullptr);
    return most;
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  io::SimulatedDisk disk_{{.seed = layouts_.Uniform(0, UINT32_MAX),
                           .latency_us_max = 200,
                           .folders = {"/disk"}}};
  std::unique_ptr<NvmeTestJob> job_;
};

TEST_F(NvmeFramesTest, APassReadsWhatItHasNoFramesFor) {
  for (const uint64_t frames :
       {NvmeStore::kFramesMin, uint64_t{7}, kRecords, uint64_t{5}}) {
    ASSERT_EQ(job_->ChangeFrames(frames), absl::OkStatus());
    for (int pass = 0; pass < 2; ++pass) {
      const uint64_t before = job_->store().swap_state()->counters.records_read;
      ASSERT_NO_FATAL_FAILURE(Update());
      const uint64_t read =
          job_->store().swap_state()->counters.records_read - before;
      // The first pass brings in what the former frames had no room for.
      EXPECT_TRUE(pass == 0 || read == kRecords - frames)
          << read << " records read with " << frames << " frames";
    }
    EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  }
}

TEST_F(NvmeFramesTest, AMemoryThatCannotBeResizedStaysInUse) {
  const absl::Status refused = job_->store().ChangeFrames(
      NvmeStore::kFramesMin, [](absl::Span<std::byte>*) {
        return absl::ResourceExhaustedError("no room");
      });
  EXPECT_EQ(refused, absl::ResourceExhaustedError("no room"));
  ASSERT_NO_FATAL_FAILURE(Update());
  const uint64_t read = job_->store().swap_state()->counters.records_read;
  ASSERT_NO_FATAL_FAILURE(Update());
  EXPECT_EQ(job_->store().swap_state()->counters.records_read, read);
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  EXPECT_EQ(job_->ChangeFrames(NvmeStore::kFramesMin), absl::OkStatus());
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

TEST_F(NvmeFramesTest, FramesThatAreGivenUpSayHowMuchIsToBeWritten) {
  EXPECT_EQ(MostToWrite(&disk_, job_.get(),
                        [this] {
                          EXPECT_EQ(job_->ChangeFrames(NvmeStore::kFramesMin),
                                    absl::OkStatus());
                        }),
            kRecords - NvmeStore::kFramesMin);
}

TEST_F(NvmeFramesTest, ACommitSaysHowMuchIsToBeWritten) {
  io::SimulatedDisk disk{{.seed = layouts_.Uniform(0, UINT32_MAX),
                          .latency_us_max = 200,
                          .folders = {"/disk"}}};
  NvmeTestJob::Setup setup = job_->setup();
  setup.is_durable = true;
  setup.make_engine = [&disk] { return io::MakeSimulatedIoEngine(&disk); };
  NvmeTestJob job(std::move(setup));
  ASSERT_EQ(job.Open(), absl::OkStatus());
  // Every record has a frame, so that none is written before the commit.
  for (size_t i = 0; i < kRecords; ++i) {
    ASSERT_EQ(job.Write(i, &random_), absl::OkStatus());
  }
  EXPECT_EQ(MostToWrite(&disk, &job,
                        [&job] {
                          EXPECT_EQ(job.RequestCommit(1), absl::OkStatus());
                          EXPECT_EQ(job.store().AwaitCommit(),
                                    absl::OkStatus());
                        }),
            kRecords);
}

// A record that could not be written is still in its frame, and the memory is
// as it was.
TEST_F(NvmeFramesTest, ADiskThatDoesNotTakeRecordsEndsTheChange) {
  io::SimulatedFault fault;
  fault.kind = io::IoRequest::Kind::kWrite;
  fault.path = "/disk/records";
  fault.skip = 2;
  disk_.AddFault(fault);
  const absl::Status failed = job_->ChangeFrames(
      NvmeStore::kFramesMin, [] { return absl::InternalError("resized"); });
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  EXPECT_EQ(job_->setup().frames, kRecords);
  disk_.ClearFaults();
  job_->Close();
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

TEST_F(NvmeFramesTest, AVerificationGoesOn) {
  ASSERT_EQ(job_->ChangeFrames(NvmeStore::kFramesMin), absl::OkStatus());
  std::atomic<bool> changed = false;
  std::atomic<int> verified = 0;
  std::thread verifier([&] {
    while (!changed || verified == 0) {
      const auto result = job_->store().Verify(
          [](const storage::VerifyResult&) { return true; });
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->progress.damaged, 0);
      EXPECT_EQ(result->progress.records, kRecords);
      ++verified;
    }
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(
        job_->ChangeFrames(layouts_.Uniform(NvmeStore::kFramesMin, kRecords)),
        absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(Update());
  }
  changed = true;
  verifier.join();
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

// Set by the hook of kFramesGivenUp.
std::byte* given_up_table = nullptr;
std::atomic<uint32_t> frames_named = 0;
std::atomic<int> times_given_up = 0;

// A process killed after this point leaves a file that is cut, and a table that
// names none of its frames.
TEST_F(NvmeFramesTest, NoPlaceNamesAFrameWhoseMemoryGoes) {
  given_up_table = job_->table().span().data();
  times_given_up = 0;
  frames_named = 0;
  storage::persist_hook = [](storage::PersistPoint point) {
    if (point != storage::PersistPoint::kFramesGivenUp) return;
    ++times_given_up;
    // Places, see FORMAT.md: 1 + the frame, in the lower half.
    for (uint32_t i = 0; i < kRecords; ++i) {
      uint32_t frame = 0;
      std::memcpy(&frame, given_up_table + 64 + 8 * i, sizeof(frame));
      if (frame > NvmeStore::kFramesMin) ++frames_named;
    }
  };
  int times_before_resize = 0;
  EXPECT_EQ(job_->ChangeFrames(NvmeStore::kFramesMin,
                               [&times_before_resize] {
                                 times_before_resize = times_given_up;
                                 return absl::OkStatus();
                               }),
            absl::OkStatus());
  storage::persist_hook = nullptr;
  EXPECT_EQ(times_before_resize, 1);
  EXPECT_EQ(frames_named, 0);
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

// Each change has a thread of I/O of its own; what the former ones used counts.
TEST_F(NvmeFramesTest, CpuTimeIsNotLost) {
  uint64_t before = 0;
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(job_->ChangeFrames(NvmeStore::kFramesMin + i % 2),
              absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(Update());
    const storage::SwapCounters counters = job_->store().swap_state()->counters;
    EXPECT_GE(counters.cpu_ns, before);
    EXPECT_LE(counters.last_pass.cpu_ns, counters.cpu_ns);
    before = counters.cpu_ns;
  }
}

}  // namespace
}  // namespace optstate::nvme
