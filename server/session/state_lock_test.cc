#include "server/session/state_lock.h"

#include <unistd.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/room_fixture.h"
#include "storage/testing/lock_limit.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A room that has locked nothing yet, unlike that of the fixture.
class StateLockTest : public RoomFixture {
 protected:
  // Says where the state lies; nothing but its kind of file system counts.
  void LieIn(const char* directory) { job_.options.directory = directory; }
  void Set(v1::LockMemory lock_memory) {
    job_.options.config.set_lock_memory(lock_memory);
  }
  v1::MemoryLock Describe() const {
    v1::MemoryLock lock;
    lock_.Describe(&lock);
    return lock;
  }

  StateLock lock_{&job_};
};

TEST_F(StateLockTest, NeverLocksNothingAndSaysSo) {
  Set(v1::LOCK_MEMORY_NEVER);
  EXPECT_TRUE(lock_.Admit(uint64_t{1} << 62).ok());
  ASSERT_TRUE(lock_.Lock().ok());
  EXPECT_EQ(Describe().locked_bytes(), 0u);
  EXPECT_EQ(Describe().unlocked_bytes(), job_.tier->bytes());
  EXPECT_EQ(Describe().reason(), "lock_memory: never");
}

TEST_F(StateLockTest, ThereIsNothingToLockOutsideOfMemory) {
  LieIn("/proc");  // as good as a disk
  Set(v1::LOCK_MEMORY_AUTO);
  EXPECT_TRUE(lock_.Admit(1).ok());
  ASSERT_TRUE(lock_.Lock().ok());
  EXPECT_EQ(Describe().unlocked_bytes(), job_.tier->bytes());
  EXPECT_THAT(Describe().reason(),
              AllOf(HasSubstr("proc"), HasSubstr("not in memory")));
}

TEST_F(StateLockTest, AlwaysRefusesAStateOutsideOfMemory) {
  LieIn("/proc");
  Set(v1::LOCK_MEMORY_ALWAYS);
  const absl::Status admitted = lock_.Admit(1);
  EXPECT_TRUE(absl::IsFailedPrecondition(admitted)) << admitted;
  EXPECT_THAT(admitted.message(), HasSubstr("Set state_dir to a tmpfs"));
  const absl::Status locked = lock_.Lock();
  EXPECT_TRUE(absl::IsFailedPrecondition(locked)) << locked;
  EXPECT_THAT(locked.message(), HasSubstr("lock_memory: always"));
}

TEST_F(StateLockTest, AlwaysRefusesWhatTheLimitHasNoRoomFor) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "needs /dev/shm";
  constexpr uint64_t kLimit = 1 << 20;
  EXPECT_TRUE(storage::PassesWithLockLimit(kLimit, [this] {
    LieIn("/dev/shm");
    Set(v1::LOCK_MEMORY_ALWAYS);
    EXPECT_TRUE(lock_.Admit(kLimit).ok());
    const absl::Status refused = lock_.Admit(2 * kLimit);
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_THAT(refused.message(),
                AllOf(HasSubstr("1048576 bytes (RLIMIT_MEMLOCK)"),
                      HasSubstr("raise it")));
    Set(v1::LOCK_MEMORY_AUTO);
    EXPECT_TRUE(lock_.Admit(2 * kLimit).ok()) << "it takes what it gets";
  }));
}

}  // namespace
}  // namespace optstate::session
