// Tests a store whose records are written anew under another arrangement, on a
// disk that fails or is full: the job is as before or as after, and goes on.

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/arrangement.h"
#include "storage/io/io_engine.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

using Kind = io::IoRequest::Kind;
using Weights = std::vector<uint32_t>;

constexpr size_t kRecordCount = 12;
const std::vector<std::string> kDirectories = {"/disk", "/disk2"};

// Holds one Poll() of an engine until another of its methods is called, and
// notes whether that is one which the engine's thread alone may call.
class HeldPoll {
 public:
  // Holds the next Poll().
  void Arm() { is_armed_ = true; }
  // Waits until one is held.
  void Await() { begun_.WaitForNotification(); }
  bool was_used_beside() const { return was_used_beside_; }

  // The engine's side.
  void OnPoll() {
    if (!is_armed_.exchange(false)) return;
    is_held_ = true;
    begun_.Notify();
    released_.WaitForNotification();
  }
  void OnCall(bool is_wake) {
    if (!is_held_.exchange(false)) return;
    was_used_beside_ = !is_wake;
    released_.Notify();
  }

 private:
  std::atomic<bool> is_armed_ = false, is_held_ = false;
  std::atomic<bool> was_used_beside_ = false;
  absl::Notification begun_, released_;
};

// An engine whose Poll() can be held.
class HeldPollEngine final : public io::IoEngine {
 public:
  // `held` outlives this.
  HeldPollEngine(std::unique_ptr<io::IoEngine> engine, HeldPoll* held)
      : engine_(std::move(engine)), held_(*held) {}

  absl::StatusOr<io::FileId> Open(const std::string& path, uint64_t bytes,
                                  OpenMode mode) override {
    held_.OnCall(/*is_wake=*/false);
    return engine_->Open(path, bytes, mode);
  }
  absl::StatusOr<io::FileId> OpenExtent(const std::string& device,
                                        const io::Extent& extent) override {
    held_.OnCall(/*is_wake=*/false);
    return engine_->OpenExtent(device, extent);
  }
  void Close(io::FileId file) override {
    held_.OnCall(/*is_wake=*/false);
    engine_->Close(file);
  }
  absl::Status Remove(const std::string& path) override {
    held_.OnCall(/*is_wake=*/false);
    return engine_->Remove(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    held_.OnCall(/*is_wake=*/false);
    return engine_->Rename(from, to);
  }
  void RegisterMemory(absl::Span<std::byte> memory) override {
    held_.OnCall(/*is_wake=*/false);
    engine_->RegisterMemory(memory);
  }
  void Submit(io::IoRequest* request) override {
    held_.OnCall(/*is_wake=*/false);
    engine_->Submit(request);
  }
  size_t Poll(absl::Span<io::IoRequest*> completed, bool wait) override {
    held_.OnPoll();
    return engine_->Poll(completed, wait);
  }
  void Wake() override {
    held_.OnCall(/*is_wake=*/true);
    engine_->Wake();
  }
  size_t in_flight() const override { return engine_->in_flight(); }
  const char* name() const override { return engine_->name(); }

 private:
  const std::unique_ptr<io::IoEngine> engine_;
  HeldPoll& held_;
};

class NvmeRearrangeTest : public testing::TestWithParam<bool> {
 protected:
  NvmeRearrangeTest() : random_(layouts_.Uniform(0, UINT32_MAX)) {}

  // Makes a job whose records are newer in frames, on disk, and, of a durable
  // one, in two slots. Nothing is read or written when it returns, so that the
  // disk may be changed.
  void Start(uint64_t capacity_bytes = UINT64_MAX) {
    job_ = nullptr;
    disk_ = std::make_unique<io::SimulatedDisk>(
        io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT32_MAX),
                                 .capacity_bytes = capacity_bytes,
                                 .latency_us_max = 200,
                                 .folders = {"/disk", "/disk2"}});
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
    setup.is_durable = GetParam();
    setup.directories = kDirectories;
    setup.make_engine = [this] {
      return io::MakeSimulatedIoEngine(disk_.get());
    };
    job_ = std::make_unique<NvmeTestJob>(setup);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    WriteAll();
    if (GetParam()) Commit(1);
    WriteAll();
    Reopen();
  }
  // Ends what is under way.
  void Reopen() {
    job_->Close();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
  }
  void WriteAll() {
    for (size_t i = 0; i < kRecordCount; ++i) {
      ASSERT_EQ(job_->Write(i, &random_), absl::OkStatus());
    }
  }
  void Commit(uint64_t step) {
    ASSERT_EQ(job_->RequestCommit(step), absl::OkStatus());
    ASSERT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
  }
  // The job has all its bytes, works, and survives the end of its engine and,
  // of a durable one, a power cut.
  void ExpectItGoesOn() {
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    job_->Close();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    WriteAll();
    if (!GetParam()) return;
    Commit(++step_);
    WriteAll();  // lost
    ASSERT_EQ(job_->Restore(), absl::OkStatus());
    ASSERT_EQ(job_->store().durable_step(), step_);
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
  }
  // Says whether a disk has files of the arrangement that the job has alone.
  void ExpectOneArrangement() {
    const bool is_odd = job_->setup().arrangement % 2 == 1;
    for (const std::string& directory : kDirectories) {
      EXPECT_FALSE(
          disk_->Exists(directory + (is_odd ? "/records" : "/records.1")));
    }
    EXPECT_FALSE(disk_->Exists("/disk/commits.1"));
    EXPECT_FALSE(disk_->Exists("/disk/commits.2"));
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  std::unique_ptr<io::SimulatedDisk> disk_;
  std::unique_ptr<NvmeTestJob> job_;
  uint64_t step_ = 1;
};

TEST_P(NvmeRearrangeTest, RecordsMoveAndNothingOfTheFormerOnesIsLeft) {
  Start();
  for (const Weights& weights :
       {Weights{3, 1}, Weights{0, 1}, Weights{}, Weights{5, 7}}) {
    ASSERT_EQ(job_->Rearrange(kDirectories, weights), absl::OkStatus());
    ExpectOneArrangement();
    ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  }
  ASSERT_EQ(job_->Rearrange({"/disk"}, {}), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  EXPECT_EQ(job_->store().swap_state()->directories.size(), 1u);
}

TEST_P(NvmeRearrangeTest, ItsProgressGrowsFromNothingToAllThatIsWritten) {
  Start();
  std::vector<storage::RewriteState> seen;
  bool is_over = false;
  // The store's own thread, which has its lock, uses the new files only later.
  disk_->SetHook([&](const io::SimulatedEvent& event) {
    if (is_over || !absl::EndsWith(event.path, "/records.1")) return;
    const std::optional<storage::RewriteState> state =
        job_->store().rewriting();
    ASSERT_TRUE(state.has_value());
    seen.push_back(*state);
  });
  ASSERT_EQ(job_->Rearrange(kDirectories, {3, 1},
                            [&is_over] {
                              is_over = true;
                              return absl::OkStatus();
                            }),
            absl::OkStatus());
  disk_->SetHook(nullptr);
  ASSERT_FALSE(seen.empty());
  uint64_t bytes = 0, bytes_total = 0;
  for (const storage::RewriteState& state : seen) {
    EXPECT_GE(state.bytes, bytes);
    if (bytes_total != 0) {
      EXPECT_EQ(state.bytes_total, bytes_total);
    }
    bytes = state.bytes;
    bytes_total = state.bytes_total;
  }
  EXPECT_EQ(seen.front().bytes, 0u);
  EXPECT_GT(bytes, 0u);
  EXPECT_EQ(bytes, bytes_total);
  EXPECT_FALSE(job_->store().rewriting().has_value());
}

// Every call of a rearrangement fails once, in turn.
TEST_P(NvmeRearrangeTest, AnErrorOfAnyCallLeavesTheJobAsItWas) {
  Start();
  int failed = 0;
  int calls = 0;
  for (const Kind kind : {Kind::kWrite, Kind::kSync}) {
    bool reached = true;
    for (uint64_t skip = 0; reached; ++skip) {
      const uint32_t before = job_->setup().arrangement;
      // Frames may be written while nothing is arranged, and must not fail.
      ASSERT_NO_FATAL_FAILURE(Reopen());
      io::SimulatedFault fault;
      fault.kind = kind;
      fault.skip = skip;
      fault.error_number = kind == Kind::kWrite ? ENOSPC : EIO;
      bool is_switched = false;
      disk_->AddFault(fault);
      const absl::Status status =
          job_->Rearrange(kDirectories, {2, 1}, [&is_switched] {
            is_switched = true;
            return absl::OkStatus();
          });
      disk_->ClearFaults();
      ++calls;
      reached = !status.ok();
      SCOPED_TRACE(absl::StrCat(static_cast<int>(kind), " ", skip, ": ",
                                status.ToString()));
      if (!status.ok()) {
        ++failed;
        EXPECT_TRUE(absl::IsResourceExhausted(status) ||
                    absl::IsDataLoss(status) || absl::IsInternal(status) ||
                    absl::IsUnavailable(status));
        EXPECT_EQ(job_->setup().arrangement, before + (is_switched ? 1 : 0));
        if (is_switched) {
          // The store works no more; the next one finds the new arrangement.
          EXPECT_EQ(job_->store().RequestCommit(99, "").ok(), false);
          job_->Close();
          ASSERT_EQ(job_->Open(), absl::OkStatus());
        }
        ExpectOneArrangement();
      }
      ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
    }
  }
  // Each record that is on disk as it is in memory is written, and each file is
  // synced.
  EXPECT_GE(failed,
            static_cast<int>(kRecordCount - storage::kSwapFramesMin) + 2);
  std::cerr << failed << " of " << calls << " calls failed" << std::endl;
}

TEST_P(NvmeRearrangeTest, ADiskThatIsFullLeavesTheJobAsItWas) {
  Start();
  const uint64_t bytes = job_->sizes().disk;
  for (const uint64_t room : {uint64_t{0}, bytes / 4, bytes / 2, bytes}) {
    SCOPED_TRACE(room);
    Start(/*capacity_bytes=*/bytes + room + (64 << 10));
    const absl::Status status = job_->Rearrange(kDirectories, {2, 1});
    if (room == bytes) {
      EXPECT_EQ(status, absl::OkStatus());
    } else {
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      EXPECT_EQ(job_->setup().arrangement, 0u);
    }
    ExpectOneArrangement();
    ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  }
}

TEST_P(NvmeRearrangeTest, ADamagedRecordIsNamedAndStaysWhereItIs) {
  Start();
  io::SimulatedFault fault;
  fault.kind = Kind::kRead;
  fault.path = "/disk2/records";
  fault.times = io::SimulatedFault::kForever;
  disk_->AddFault(fault);
  const absl::Status status = job_->Rearrange(kDirectories, {2, 1});
  disk_->ClearFaults();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("/disk2/records"), std::string::npos)
      << status;
  ExpectOneArrangement();
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  // A read that fails a few times is tried again.
  ASSERT_NO_FATAL_FAILURE(Reopen());
  fault.times = 2;
  disk_->AddFault(fault);
  EXPECT_EQ(job_->Rearrange(kDirectories, {2, 1}), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

TEST_P(NvmeRearrangeTest, ASwitchThatIsRefusedLeavesTheJobAsItWas) {
  Start();
  EXPECT_TRUE(absl::IsAborted(job_->Rearrange(
      kDirectories, {2, 1}, [] { return absl::AbortedError("no"); })));
  EXPECT_EQ(job_->setup().arrangement, 0u);
  ExpectOneArrangement();
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  EXPECT_TRUE(
      absl::IsInvalidArgument(job_->Rearrange(kDirectories, {1, 2, 3})));
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

// Files of the next arrangement are removed while the thread of I/O is at work.
TEST_P(NvmeRearrangeTest, OneThreadAtATimeUsesTheEngineWhenFilesAreRemoved) {
  Start();
  HeldPoll held;
  job_->Close();
  job_->SetEngineMaker([this, &held] {
    return std::make_unique<HeldPollEngine>(
        io::MakeSimulatedIoEngine(disk_.get()), &held);
  });
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  held.Arm();
  // The record is not in a frame, so the disk is asked for it.
  absl::Status compared;
  std::thread reader([&] { compared = job_->Compare(0); });
  held.Await();
  storage::Arrangement next;
  next.number = 1;
  next.directories = kDirectories;
  job_->store().RemoveAnew(next);
  EXPECT_FALSE(held.was_used_beside());
  reader.join();
  EXPECT_EQ(compared, absl::OkStatus());
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  job_ = nullptr;
}

INSTANTIATE_TEST_SUITE_P(Durable, NvmeRearrangeTest, testing::Bool());

}  // namespace
}  // namespace optstate::nvme
