// Tests a store whose records move to another arrangement while steps go on.
//
// Until CopyRecords() is called no copy is compared, so nothing that is copied
// comes on: what steps do before that, they do beside a move that stands still.

#include <atomic>
#include <cerrno>
#include <cstdint>
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
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/record_rewrite.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"
#include "storage/verify_result.h"

namespace optstate::nvme {
namespace {

using Kind = io::IoRequest::Kind;
using Weights = std::vector<uint32_t>;

constexpr size_t kRecordCount = 12;
const std::vector<std::string> kDirectories = {"/disk", "/disk2"};

class NvmeMoveTest : public testing::TestWithParam<bool> {
 protected:
  NvmeMoveTest() : random_(layouts_.Uniform(0, UINT32_MAX)) {}

  // Makes a job with few frames, so that steps write records to disk. Nothing
  // is read or written when it returns, so that the disk may be changed.
  void Start() {
    job_ = nullptr;
    disk_ = std::make_unique<io::SimulatedDisk>(
        io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT32_MAX),
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
    ASSERT_NO_FATAL_FAILURE(Step());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    job_->Close();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
  }
  void WriteAll() {
    for (size_t i = 0; i < kRecordCount; ++i) {
      ASSERT_EQ(job_->Write(i, &random_), absl::OkStatus());
    }
  }
  // Changes every record, and has that be durable.
  void Step() {
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    if (!GetParam()) return;
    ASSERT_EQ(job_->RequestCommit(++step_), absl::OkStatus());
    ASSERT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
  }
  // The job has all its bytes, works, and survives the end of its engine and,
  // of a durable one, a power cut.
  void ExpectItGoesOn() {
    ExpectOneArrangement();
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    job_->Close();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(Step());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    if (!GetParam()) return;
    ASSERT_EQ(job_->Restore(), absl::OkStatus());  // what was written is lost
    ASSERT_EQ(job_->store().durable_step(), step_);
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
  }
  // The disk has files of the arrangement that the job has alone.
  void ExpectOneArrangement() {
    const bool is_odd = job_->setup().arrangement % 2 == 1;
    for (const std::string& directory : kDirectories) {
      EXPECT_FALSE(
          disk_->Exists(directory + (is_odd ? "/records" : "/records.1")));
    }
    EXPECT_FALSE(disk_->Exists("/disk/commits.1"));
    EXPECT_FALSE(disk_->Exists("/disk/commits.2"));
  }
  absl::Status Copy() { return job_->store().CopyRecords(); }
  // Steps may have left writes, which call the hook.
  void EndMoveAndDropHook() {
    job_->EndMove();
    job_->Close();
    disk_->SetHook(nullptr);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  std::unique_ptr<io::SimulatedDisk> disk_;
  std::unique_ptr<NvmeTestJob> job_;
  uint64_t step_ = 0;
};

TEST_P(NvmeMoveTest, StepsGoOnBeforeDuringAndAfterTheCopy) {
  Start();
  for (const Weights& weights : {Weights{3, 1}, Weights{0, 1}, Weights{}}) {
    ASSERT_EQ(job_->BeginMove(kDirectories, weights), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(Step());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    ASSERT_EQ(Copy(), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_NO_FATAL_FAILURE(Step());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    const uint32_t before = job_->setup().arrangement;
    ASSERT_EQ(job_->FinishMove(), absl::OkStatus());
    EXPECT_EQ(job_->setup().arrangement, before + 1);
    ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  }
}

// Steps never pause until the copy is over: a move that they could keep from
// its end would not let this test end.
TEST_P(NvmeMoveTest, ItComesToAnEndWhileStepsWriteEveryRecord) {
  Start();
  for (const Weights& weights : {Weights{1, 2}, Weights{5, 1}}) {
    ASSERT_EQ(job_->BeginMove(kDirectories, weights), absl::OkStatus());
    std::atomic<bool> is_over = false;
    absl::Status copied;
    std::thread copier([&] {
      copied = Copy();
      is_over = true;
    });
    do {
      Step();
    } while (!is_over && !HasFailure());
    if (HasFailure()) job_->store().CancelMove(absl::AbortedError("failed"));
    copier.join();
    ASSERT_EQ(copied, absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_EQ(job_->FinishMove(), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  }
}

TEST_P(NvmeMoveTest, WhatStepsWriteNeedsNoCopy) {
  Start();
  EXPECT_FALSE(job_->store().rewriting().has_value());
  ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
  const std::optional<storage::RewriteState> before = job_->store().rewriting();
  ASSERT_TRUE(before.has_value());
  EXPECT_TRUE(before->is_move);
  EXPECT_GT(before->bytes_total, 0u);
  // Both slots of each record, and the commit names one of them.
  ASSERT_NO_FATAL_FAILURE(Step());
  ASSERT_NO_FATAL_FAILURE(Step());
  const std::optional<storage::RewriteState> after = job_->store().rewriting();
  ASSERT_TRUE(after.has_value());
  EXPECT_EQ(after->bytes_total, before->bytes_total);
  EXPECT_EQ(after->bytes, after->bytes_total);
  ASSERT_EQ(Copy(), absl::OkStatus());
  ASSERT_EQ(job_->FinishMove(), absl::OkStatus());
  EXPECT_FALSE(job_->store().rewriting().has_value());
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

// Writes and syncs of the next arrangement's files fail, those that steps make
// as well as those of the copy.
TEST_P(NvmeMoveTest, AnErrorOfTheNextFilesEndsTheMoveAndNothingElse) {
  for (const char* path : {"/disk/records.1", "/disk2/records.1"}) {
    for (const auto& [kind, error] :
         {std::pair(Kind::kWrite, ENOSPC), std::pair(Kind::kWrite, EIO),
          std::pair(Kind::kSync, EIO)}) {
      for (const bool steps_first : {true, false}) {
        for (const uint64_t skip : {uint64_t{0}, uint64_t{1}}) {
          SCOPED_TRACE(absl::StrCat(path, " ", static_cast<int>(kind), " ",
                                    error, " ", steps_first, " ", skip));
          ASSERT_NO_FATAL_FAILURE(Start());
          io::SimulatedFault fault;
          fault.kind = kind;
          fault.path = path;
          fault.skip = skip;
          fault.error_number = error;
          disk_->AddFault(fault);
          ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
          if (steps_first) {
            ASSERT_NO_FATAL_FAILURE(Step());
            ASSERT_NO_FATAL_FAILURE(WriteAll());
          }
          absl::Status status = Copy();
          ASSERT_NO_FATAL_FAILURE(Step());
          if (status.ok()) {
            status = job_->FinishMove();
          } else {
            job_->EndMove();
          }
          if (error == ENOSPC) {
            EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
          } else {
            EXPECT_TRUE(absl::IsDataLoss(status)) << status;
          }
          EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
          EXPECT_EQ(job_->store().status(), absl::OkStatus());
          EXPECT_EQ(job_->setup().arrangement, 0u);
          EXPECT_FALSE(job_->store().rewriting().has_value());
          ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
        }
      }
    }
  }
}

// A disk that has failed is left alone by the steps that follow.
TEST_P(NvmeMoveTest, NothingIsWrittenTwiceOnceTheMoveHasFailed) {
  Start();
  std::atomic<bool> is_over = false;
  std::atomic<int> writes = 0, late_writes = 0;
  disk_->SetHook([&](const io::SimulatedEvent& event) {
    if (event.kind == io::SimulatedEvent::Kind::kWriteBegun &&
        absl::EndsWith(event.path, "/records.1")) {
      ++(is_over ? late_writes : writes);
    }
  });
  io::SimulatedFault fault;
  fault.kind = Kind::kWrite;
  fault.path = "/disk2/records.1";
  disk_->AddFault(fault);
  ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(Step());
  const absl::Status failed = Copy();
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  // Frames whose second write had begun are used anew here, after its end.
  ASSERT_NO_FATAL_FAILURE(Step());
  ASSERT_NO_FATAL_FAILURE(WriteAll());
  is_over = true;
  ASSERT_NO_FATAL_FAILURE(Step());
  ASSERT_NO_FATAL_FAILURE(WriteAll());
  EndMoveAndDropHook();
  EXPECT_GT(writes.load(), 0);
  EXPECT_EQ(late_writes.load(), 0);
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

// A failure there is the store's, as without a move.
TEST_P(NvmeMoveTest, AnErrorOfThePresentFilesEndsTheStore) {
  Start();
  io::SimulatedFault fault;
  fault.kind = Kind::kWrite;
  fault.path = "/disk/records";
  fault.times = io::SimulatedFault::kForever;
  disk_->AddFault(fault);
  ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
  absl::Status written;
  for (size_t i = 0; i < 2 * kRecordCount && written.ok(); ++i) {
    written = job_->Write(i % kRecordCount, &random_);
  }
  EXPECT_TRUE(absl::IsDataLoss(written)) << written;
  EXPECT_EQ(Copy(), written);
  job_->EndMove();
  EXPECT_EQ(job_->store().status(), written);
  disk_->ClearFaults();
  job_->Close();
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

TEST_P(NvmeMoveTest, ADamagedRecordIsNamedAndTheMoveGivenUp) {
  Start();
  io::SimulatedFault fault;
  fault.kind = Kind::kRead;
  fault.path = "/disk2/records";
  fault.times = io::SimulatedFault::kForever;
  disk_->AddFault(fault);
  ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
  const absl::Status status = Copy();
  job_->EndMove();
  disk_->ClearFaults();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "/disk2/records")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "tried 3 times")) << status;
  ASSERT_NO_FATAL_FAILURE(Step());
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

TEST_P(NvmeMoveTest, AMoveThatIsCancelledLeavesTheJobAsItWas) {
  const absl::Status enough = absl::AbortedError("enough");
  for (const bool before_copy : {true, false}) {
    SCOPED_TRACE(before_copy);
    ASSERT_NO_FATAL_FAILURE(Start());
    job_->store().CancelMove(enough);  // there is none
    if (!before_copy) {
      // On the thread of I/O, as the first copy is written.
      disk_->SetHook([&](const io::SimulatedEvent& event) {
        if (event.kind == io::SimulatedEvent::Kind::kWriteBegun &&
            absl::EndsWith(event.path, "/records.1")) {
          job_->store().CancelMove(enough);
        }
      });
    }
    ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
    if (before_copy) job_->store().CancelMove(enough);
    EXPECT_EQ(Copy(), enough);
    ASSERT_NO_FATAL_FAILURE(Step());
    EndMoveAndDropHook();
    EXPECT_EQ(job_->setup().arrangement, 0u);
    ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  }
  // After the copy it is the switch that is refused.
  ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
  ASSERT_EQ(Copy(), absl::OkStatus());
  job_->store().CancelMove(enough);
  EXPECT_EQ(job_->FinishMove(), enough);
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

TEST_P(NvmeMoveTest, CallsOutOfOrderAreRefused) {
  Start();
  EXPECT_TRUE(absl::IsFailedPrecondition(Copy()));
  const auto never = [] {
    ADD_FAILURE() << "nothing was copied";
    return absl::OkStatus();
  };
  EXPECT_TRUE(
      absl::IsFailedPrecondition(job_->store().FinishMove(never).status()));
  job_->store().EndMove();
  ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
  EXPECT_TRUE(
      absl::IsFailedPrecondition(job_->BeginMove(kDirectories, {1, 2})));
  storage::RewriteTarget target;
  EXPECT_TRUE(
      absl::IsFailedPrecondition(job_->store().WriteAnew(target).status()));
  // The bytes read were not compared, so not all can have been copied.
  EXPECT_TRUE(
      absl::IsFailedPrecondition(job_->FinishMove([&] { return never(); })));
  EXPECT_EQ(job_->setup().arrangement, 0u);
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

TEST_P(NvmeMoveTest, FramesComeAndGoWhileRecordsMove) {
  Start();
  ASSERT_EQ(job_->BeginMove(kDirectories, {1, 3}), absl::OkStatus());
  ASSERT_EQ(job_->ChangeFrames(9), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(Step());
  ASSERT_EQ(job_->ChangeFrames(NvmeStore::kFramesMin), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(WriteAll());
  absl::Status copied;
  std::thread copier([&] { copied = Copy(); });
  EXPECT_EQ(job_->ChangeFrames(7), absl::OkStatus());
  Step();
  copier.join();
  ASSERT_EQ(copied, absl::OkStatus());
  ASSERT_EQ(job_->ChangeFrames(5), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(WriteAll());
  ASSERT_EQ(job_->FinishMove(), absl::OkStatus());
  EXPECT_EQ(job_->setup().frames, 5u);
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

TEST_P(NvmeMoveTest, AnEngineThatEndsInItLeavesTheFormerArrangement) {
  for (const bool copies : {false, true}) {
    ASSERT_NO_FATAL_FAILURE(Start());
    ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(Step());
    if (copies) {
      ASSERT_EQ(Copy(), absl::OkStatus());
    }
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    EXPECT_TRUE(disk_->Exists("/disk/records.1"));
    job_->Close();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    EXPECT_EQ(job_->setup().arrangement, 0u);
    ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  }
}

// Commits are under way when the move begins and when it ends, and records that
// they name are changed meanwhile. No commit follows the switch.
TEST_P(NvmeMoveTest, APowerCutRightAfterItLeavesTheLastDurableStep) {
  if (!GetParam()) GTEST_SKIP() << "nothing is to survive a power cut";
  Start();
  for (const Weights& weights : {Weights{3, 1}, Weights{1, 4}, Weights{}}) {
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_EQ(job_->RequestCommit(++step_), absl::OkStatus());
    ASSERT_EQ(job_->BeginMove(kDirectories, weights), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_EQ(Copy(), absl::OkStatus());
    ASSERT_EQ(job_->RequestCommit(++step_), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_EQ(job_->FinishMove(), absl::OkStatus());
    ASSERT_EQ(job_->Restore(), absl::OkStatus());
    EXPECT_EQ(job_->store().durable_step(), step_);
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    ExpectOneArrangement();
  }
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

// The switch does not wait for the caller of a verification that is under way.
TEST_P(NvmeMoveTest, AVerificationGoesOnInTheNextFiles) {
  Start();
  ASSERT_EQ(job_->BeginMove(kDirectories, {2, 1}), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(Step());
  ASSERT_EQ(Copy(), absl::OkStatus());
  absl::Notification begun, go_on;
  absl::StatusOr<storage::VerifyResult> verified = absl::UnknownError("");
  std::thread verifier([&] {
    verified = job_->store().Verify([&](const storage::VerifyResult& found) {
      if (found.progress.records > 1) return true;
      begun.Notify();
      go_on.WaitForNotification();
      return true;
    });
  });
  begun.WaitForNotification();
  const absl::Status finished = job_->FinishMove();
  go_on.Notify();
  verifier.join();
  ASSERT_EQ(finished, absl::OkStatus());
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->progress.records, kRecordCount);
  EXPECT_EQ(verified->progress.damaged, 0u);
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

// A verification names files while they are exchanged: a sanitizer sees a use
// of what is gone.
TEST_P(NvmeMoveTest, DamageIsFoundAndNamedWhileTheFilesAreExchanged) {
  Start();
  for (uint32_t round = 0; round < 20; ++round) {
    ASSERT_EQ(job_->BeginMove(kDirectories, {1, 2 + round % 2}),
              absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(Step());
    ASSERT_EQ(Copy(), absl::OkStatus());
    // Ends what is under way, so that the disk may be changed.
    ASSERT_EQ(job_->ChangeFrames(NvmeStore::kFramesMin), absl::OkStatus());
    io::SimulatedFault fault;
    fault.kind = Kind::kRead;
    fault.path = round % 2 == 0 ? "/disk/records" : "/disk/records.1";
    fault.times = io::SimulatedFault::kForever;
    disk_->AddFault(fault);
    absl::Notification begun;
    std::atomic<bool> is_over = false;
    std::thread verifier([&] {
      do {
        const auto verified = job_->store().Verify(
            [](const storage::VerifyResult& /*found*/) { return true; });
        if (!begun.HasBeenNotified()) begun.Notify();
        EXPECT_TRUE(verified.ok()) << verified.status();
        if (!verified.ok()) return;
        for (const storage::RecordDamage& damage : verified->damages) {
          EXPECT_TRUE(absl::StartsWith(damage.file, "/disk/records"))
              << damage.file;
        }
      } while (!is_over);
    });
    begun.WaitForNotification();
    const absl::Status finished = job_->FinishMove();
    is_over = true;
    verifier.join();
    disk_->ClearFaults();
    ASSERT_EQ(finished, absl::OkStatus());
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
  }
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

INSTANTIATE_TEST_SUITE_P(Durable, NvmeMoveTest, testing::Bool());

}  // namespace
}  // namespace optstate::nvme
