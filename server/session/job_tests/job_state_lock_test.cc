// The job's state is locked in memory, as far as lock_memory and RLIMIT_MEMLOCK
// say.

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"
#include "storage/memory/memory_locker.h"
#include "storage/testing/lock_limit.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kElements = 300'000;
// Less than the state of a job, more than nothing.
constexpr uint64_t kLimit = 1 << 20;

JobHarness::Setup SetupOf(v1::LockMemory lock_memory,
                          v1::Placement placement = v1::PLACEMENT_HOST) {
  JobHarness::Setup setup;
  setup.layout.groups.resize(1);
  setup.layout.parameters = {MakeParameter("a", kElements)};
  setup.storage.set_placement(placement);
  setup.lock_memory = lock_memory;
  return setup;
}

bool IsInMemory() { return ::access("/dev/shm", W_OK) == 0; }

uint64_t VmLck() {
  std::ifstream status("/proc/self/status");
  std::string word;
  uint64_t kilobytes = 0;
  while (status >> word) {
    if (word == "VmLck:") status >> kilobytes;
  }
  return kilobytes * 1024;
}

// Describes what is locked once all has been brought in.
v1::MemoryLock Settled(JobHarness* job) {
  while (true) {
    const v1::MemoryLock lock = job->job().Describe().memory_lock();
    if (lock.pending_bytes() == 0) return lock;
    std::this_thread::yield();
  }
}

void TrainOneStep(JobHarness* job) {
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  CommitSpec commit;
  commit.step = 1;
  commit.groups = groups;
  job->Start(job->RandomTensors(1));
  job->Step(1, job->RandomTensors(2), commit);
}

TEST(JobStateLockTest, EachEngineLocksTheWholeState) {
  if (!IsInMemory()) GTEST_SKIP() << "needs /dev/shm";
  for (const v1::Placement placement :
       {v1::PLACEMENT_HOST, v1::PLACEMENT_NVME}) {
    JobHarness job(SetupOf(v1::LOCK_MEMORY_AUTO, placement));
    if (storage::MemoryLocker::LimitBytes() !=
        storage::MemoryLocker::kUnlimited) {
      GTEST_SKIP() << "RLIMIT_MEMLOCK is too low here";
    }
    const uint64_t before = VmLck();
    TrainOneStep(&job);
    for (int engine = 0; engine < 2; ++engine) {
      SCOPED_TRACE(absl::StrCat("engine ", engine));
      const v1::MemoryLock lock = Settled(&job);
      EXPECT_GE(lock.locked_bytes(), job.job().Describe().state_bytes());
      EXPECT_EQ(lock.unlocked_bytes(), 0);
      EXPECT_EQ(lock.reason(), "");
      EXPECT_EQ(VmLck() - before, lock.locked_bytes());
      job.Close();
      EXPECT_EQ(VmLck(), before);
      ASSERT_TRUE(job.Open().ok());
    }
  }
}

TEST(JobStateLockTest, AutoLocksWhatTheLimitAllowsAndSaysTheRest) {
  if (!IsInMemory()) GTEST_SKIP() << "needs /dev/shm";
  EXPECT_TRUE(storage::PassesWithLockLimit(kLimit, [] {
    JobHarness job(SetupOf(v1::LOCK_MEMORY_AUTO));
    TrainOneStep(&job);
    const v1::MemoryLock lock = Settled(&job);
    EXPECT_GT(lock.locked_bytes(), kLimit - 64 * 4096);
    EXPECT_LE(lock.locked_bytes(), kLimit);
    EXPECT_EQ(lock.locked_bytes(), VmLck());
    EXPECT_GE(lock.locked_bytes() + lock.unlocked_bytes(),
              job.job().Describe().state_bytes());
    EXPECT_THAT(lock.reason(),
                AllOf(HasSubstr("may lock 1048576 bytes (RLIMIT_MEMLOCK)"),
                      HasSubstr("LimitMEMLOCK=infinity"),
                      HasSubstr("lock_memory: never")));
  }));
}

TEST(JobStateLockTest, AlwaysRefusesAJobThatCannotBeLocked) {
  if (!IsInMemory()) GTEST_SKIP() << "needs /dev/shm";
  EXPECT_TRUE(storage::PassesWithLockLimit(kLimit, [] {
    JobHarness job(SetupOf(v1::LOCK_MEMORY_ALWAYS));
    const absl::Status refused = job.Register(0).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("job \"test\": lock_memory: always"),
                      HasSubstr("may lock 1048576 bytes (RLIMIT_MEMLOCK)"),
                      HasSubstr("LimitMEMLOCK=infinity")));
    EXPECT_FALSE(std::filesystem::exists(job.directory() + "/state"));
    // A job that fits is taken.
    LayoutSpec small;
    small.groups.resize(1);
    small.parameters = {MakeParameter("small", 1000)};
    job.SetLayout(small);
    TrainOneStep(&job);
    EXPECT_EQ(Settled(&job).unlocked_bytes(), 0);
    // The lock of an extension is whole, or not, in the same way.
    small.groups.push_back({});
    small.parameters.push_back(MakeParameter("large", kElements, 1));
    job.DetachAll();
    job.SetLayout(small);
    EXPECT_EQ(job.Register(0, /*extend=*/true).status().code(),
              absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(job.job().Describe().phase(), v1::JOB_PHASE_READY);
  }));
}

// The limit was lowered, or the setting changed, since the job was made.
TEST(JobStateLockTest, AlwaysRefusesAnExistingJobUntilItCanBeLocked) {
  if (!IsInMemory()) GTEST_SKIP() << "needs /dev/shm";
  EXPECT_TRUE(storage::PassesWithLockLimit(kLimit, [] {
    JobHarness job(SetupOf(v1::LOCK_MEMORY_NEVER));
    TrainOneStep(&job);
    const std::string state = job.StateBytes();
    job.Close();
    job.setup().lock_memory = v1::LOCK_MEMORY_ALWAYS;
    const absl::Status refused = job.Open();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("RLIMIT_MEMLOCK"));
    job.setup().lock_memory = v1::LOCK_MEMORY_NEVER;
    ASSERT_TRUE(job.Open().ok());
    EXPECT_EQ(job.StateBytes(), state);
  }));
}

TEST(JobStateLockTest, NeverLocksNothing) {
  const uint64_t before = VmLck();
  JobHarness job(SetupOf(v1::LOCK_MEMORY_NEVER));
  TrainOneStep(&job);
  const v1::Job described = job.job().Describe();
  EXPECT_EQ(VmLck(), before);
  EXPECT_EQ(described.memory_lock().locked_bytes(), 0);
  EXPECT_EQ(described.memory_lock().unlocked_bytes(), described.state_bytes());
  EXPECT_EQ(described.memory_lock().reason(), "lock_memory: never");
}

}  // namespace
}  // namespace optstate::session
