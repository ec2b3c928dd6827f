#include "server/session/job_lock.h"

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace optstate {
namespace {

TEST(JobLockTest, APassReturnsItsResult) {
  JobLock lock;
  JobCall call(&lock);
  EXPECT_TRUE(lock.is_idle());
  EXPECT_EQ(lock.MakePass([&] {
    EXPECT_FALSE(lock.is_idle());
    return absl::DataLossError("torn");
  }),
            absl::DataLossError("torn"));
  EXPECT_TRUE(lock.is_idle());
}

TEST(JobLockTest, OthersLookDuringAPassAndCallsWaitForItsEnd) {
  JobLock lock;
  absl::Notification begun;
  absl::Notification may_end;
  std::atomic<bool> ended{false};
  std::thread maker([&] {
    JobCall call(&lock);
    const absl::Status made = lock.MakePass([&] {
      begun.Notify();
      may_end.WaitForNotification();
      ended = true;
      return absl::OkStatus();
    });
    EXPECT_TRUE(made.ok());
  });
  begun.WaitForNotification();
  {
    absl::MutexLock look(&lock.mu);  // would not return if the pass held it
    EXPECT_FALSE(lock.is_idle());
    EXPECT_FALSE(ended);
  }
  std::thread caller([&] {
    JobCall call(&lock);
    EXPECT_TRUE(ended);
    EXPECT_TRUE(lock.is_idle());
  });
  may_end.Notify();
  maker.join();
  caller.join();
}

}  // namespace
}  // namespace optstate
