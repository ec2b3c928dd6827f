// Verifying the records that a job has on disk, while it goes on.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/session/testing/disk_job_fixture.h"
#include "server/session/testing/held_read.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

// Waits until a thread of this process sleeps, or has returned.
void AwaitAsleep(const std::atomic<int64_t>& thread,
                 const std::atomic<bool>& has_returned) {
  while (!has_returned) {
    if (thread != 0) {
      std::ifstream file(
          absl::StrCat("/proc/self/task/", thread.load(), "/stat"));
      std::string stat;
      std::getline(file, stat);
      const size_t name_end = stat.rfind(')');
      if (name_end != std::string::npos && stat[name_end + 2] == 'S') return;
    }
    std::this_thread::yield();
  }
}

using JobVerifyTest = DiskJobFixture;

TEST_F(JobVerifyTest, AWholeJobHasNoDamage) {
  for (const v1::Placement placement :
       {v1::PLACEMENT_NVME, v1::PLACEMENT_HOST}) {
    Start(placement);
    const Verified verified = Verify(job_.get());
    EXPECT_TRUE(verified.status.ok()) << verified.status;
    EXPECT_TRUE(verified.last.done());
    EXPECT_EQ(verified.last.damaged(), 0u);
    EXPECT_EQ(verified.last.skipped(), 0u);
    EXPECT_EQ(verified.last.records(), job_->job().Describe().disk().records());
    EXPECT_EQ(verified.last.records_total(), verified.last.records());
    EXPECT_GE(verified.last.bytes_read(), 3 * 4 * 8 * kSubGroup);
  }
}

TEST_F(JobVerifyTest, DamagesAreNamed) {
  Start();
  constexpr uint64_t kTileBytes = kTileElements * 4;
  const uint64_t array_bytes = SlotBytes() / 3;
  Flip(0, kTileBytes + 8);
  Flip(6, 2 * array_bytes + 100);
  const Verified verified = Verify(job_.get());
  ASSERT_TRUE(verified.status.ok()) << verified.status;
  EXPECT_EQ(verified.last.damaged(), 2u);
  EXPECT_TRUE(verified.last.done());
  ASSERT_EQ(verified.damages.size(), 2u);
  const v1::RecordDamage& state = verified.damages[0];
  EXPECT_EQ(state.file(), RecordsFile());
  EXPECT_LT(state.offset_bytes(), 2 * SlotBytes());
  EXPECT_EQ(state.offset_bytes() % SlotBytes(), 0u);
  EXPECT_EQ(state.bytes(), SlotBytes());
  EXPECT_EQ(state.kind(), v1::DAMAGE_KIND_STATE);
  EXPECT_EQ(state.tile(), 1u);
  EXPECT_EQ(state.first_parameter(), "a");
  EXPECT_EQ(state.last_parameter(), "a");
  EXPECT_THAT(state.reason(), HasSubstr("tile 1"));
  const v1::RecordDamage& parameters = verified.damages[1];
  EXPECT_EQ(parameters.kind(), v1::DAMAGE_KIND_PARAMETERS);
  EXPECT_EQ(parameters.offset_bytes() / SlotBytes() / 2, 6u);
  EXPECT_EQ(parameters.first_parameter(), "b");
}

TEST_F(JobVerifyTest, AJobInMemoryHasNothingToVerify) {
  job_ = std::make_unique<JobHarness>(
      DiskJobSetup(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_UNSPECIFIED));
  EXPECT_TRUE(absl::IsFailedPrecondition(Verify(job_.get()).status));
  job_->Start(job_->RandomTensors(kSeed));
  const absl::Status status = Verify(job_.get()).status;
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("nothing on disk"));
}

TEST_F(JobVerifyTest, TrainingGoesOnBitByBit) {
  JobHarness in_memory(
      DiskJobSetup(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_UNSPECIFIED));
  in_memory.Start(in_memory.RandomTensors(kSeed));
  Train(&in_memory, 1, 2);
  Start();
  std::atomic<bool> is_over = false;
  std::atomic<int> verifications = 0;
  std::thread verifier([&] {
    while (!is_over) {
      const Verified verified = Verify(job_.get());
      EXPECT_TRUE(verified.status.ok()) << verified.status;
      EXPECT_EQ(verified.last.damaged(), 0u);
      ++verifications;
    }
  });
  uint64_t step = 3;
  for (; step <= 12 || verifications < 3; ++step) {
    for (JobHarness* job : {&in_memory, job_.get()}) Train(job, step, step);
  }
  is_over = true;
  verifier.join();
  EXPECT_EQ(job_->StateBytes(), in_memory.StateBytes());
}

// Neither a step nor what operators see waits for the verification's read.
TEST_F(JobVerifyTest, AStepDoesNotWaitForARead) {
  Start(v1::PLACEMENT_HOST);  // steps read nothing
  HeldRead held;
  Verified verified;
  std::thread verifier([&] { verified = Verify(job_.get()); });
  held.Await();
  Train(job_.get(), 3, 3);
  EXPECT_EQ(job_->job().Describe().committed_step(), 3u);
  held.Release();
  verifier.join();
  EXPECT_TRUE(verified.status.ok()) << verified.status;
  EXPECT_EQ(verified.last.damaged(), 0u);
}

TEST_F(JobVerifyTest, ThereIsOneAtATime) {
  Start();
  HeldRead held;
  Verified verified;
  std::thread verifier([&] { verified = Verify(job_.get()); });
  held.Await();
  const absl::Status second = Verify(job_.get()).status;
  EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
  EXPECT_THAT(std::string(second.message()), HasSubstr("already"));
  held.Release();
  verifier.join();
  EXPECT_TRUE(verified.status.ok()) << verified.status;
  EXPECT_TRUE(Verify(job_.get()).status.ok());
}

TEST_F(JobVerifyTest, WhoAsksForItMayCancelIt) {
  Start();
  HeldRead held;
  absl::Status status;
  std::thread verifier([&] {
    status = job_->job().Verify([&](const v1::VerifyJobProgress& progress) {
      EXPECT_FALSE(progress.done());
      held.Release();
      return false;
    });
  });
  verifier.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_TRUE(Verify(job_.get()).status.ok());
}

// Has `ender` end a verification whose read is under way; it must wait for
// that.
absl::Status EndWith(JobHarness* job, const std::function<void()>& ender) {
  HeldRead held;
  Verified verified;
  std::thread verifier([&] { verified = Verify(job); });
  held.Await();
  std::atomic<int64_t> thread_id = 0;
  std::atomic<bool> has_returned = false;
  std::thread other([&] {
    thread_id = ::syscall(SYS_gettid);
    ender();
    has_returned = true;
  });
  AwaitAsleep(thread_id, has_returned);
  EXPECT_FALSE(has_returned);
  held.Release();
  other.join();
  verifier.join();
  EXPECT_FALSE(verified.last.done());
  return verified.status;
}

TEST_F(JobVerifyTest, DrainEndsIt) {
  Start();
  const absl::Status status =
      EndWith(job_.get(), [&] { job_->job().BeginDrain(); });
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("drains"));
  EXPECT_TRUE(absl::IsFailedPrecondition(Verify(job_.get()).status));
  job_->job().Resume();
  EXPECT_TRUE(Verify(job_.get()).status.ok());
}

TEST_F(JobVerifyTest, PauseEndsIt) {
  Start();
  const absl::Status status = EndWith(job_.get(), [&] {
    EXPECT_TRUE(job_->job().Pause(absl::InfiniteFuture(), absl::Hours(1)).ok());
  });
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_TRUE(absl::IsFailedPrecondition(Verify(job_.get()).status));
  job_->job().Resume();
  EXPECT_TRUE(Verify(job_.get()).status.ok());
}

TEST_F(JobVerifyTest, StopEndsIt) {
  Start();
  const absl::Status status = EndWith(job_.get(), [&] { job_->job().Stop(); });
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_TRUE(absl::IsFailedPrecondition(Verify(job_.get()).status));
}

// The store of the next shape is another one.
TEST_F(JobVerifyTest, AnotherWorldSizeEndsIt) {
  Start();
  job_->DetachAll();
  const absl::Status status = EndWith(job_.get(), [&] {
    job_->setup().world_size = 2;
    EXPECT_TRUE(job_->Register(0).ok());
  });
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  const Verified next = Verify(job_.get());
  EXPECT_TRUE(next.status.ok()) << next.status;
  EXPECT_EQ(next.last.damaged(), 0u);
}

TEST_F(JobVerifyTest, TheEndOfTheJobEndsIt) {
  Start();
  const absl::Status status = EndWith(job_.get(), [&] { job_->Close(); });
  EXPECT_TRUE(absl::IsAborted(status)) << status;
}

// The description of a job has the cost of its last step.
TEST_F(JobVerifyTest, TheDirectoriesAreCounted) {
  Start();
  Train(job_.get(), 3, 5);
  const v1::DiskState disk = job_->job().Describe().disk();
  ASSERT_EQ(disk.directory_io_size(), 1);
  const v1::DirectoryIo& io = disk.directory_io(0);
  EXPECT_GE(io.bytes_read(), disk.bytes_read());
  EXPECT_GE(io.bytes_written(), disk.bytes_written());
  EXPECT_GT(io.reads(), 0u);
  EXPECT_GT(io.writes(), 0u);
  EXPECT_GT(io.syncs(), 0u);
  EXPECT_EQ(io.errors(), 0u);
  // Each step writes each record once: two arrays of state, and parameters.
  EXPECT_GE(disk.step_bytes_written(), 3 * 4 * 8 * kSubGroup);
  EXPECT_LT(disk.step_bytes_written(), disk.bytes_written());
  EXPECT_GT(disk.step_cpu_ns(), 0u);
  EXPECT_GT(disk.cpu_ms_per_gb(), 0);
}

}  // namespace
}  // namespace optstate::session
