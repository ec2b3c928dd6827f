#include "server/session/job_lock.h"

#include <atomic>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace optstate::session {
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

// The work ends only when another call has used the job meanwhile.
TEST(JobLockTest, OthersUseTheJobBesideWorkThatIsNoPass) {
  JobLock lock;
  absl::Notification begun;
  absl::Notification used;
  bool is_known = false;
  std::thread worker([&] {
    JobCall call(&lock);
    lock.WorkBeside([&] {
      begun.Notify();
      used.WaitForNotification();
    });
    EXPECT_TRUE(lock.is_idle());
    EXPECT_TRUE(is_known);
  });
  begun.WaitForNotification();
  {
    JobCall call(&lock);
    EXPECT_TRUE(lock.is_idle());
    EXPECT_TRUE(lock.MakePass([&] {
                      used.Notify();
                      return absl::OkStatus();
                    })
                    .ok());
    is_known = true;
  }
  worker.join();
}

TEST(JobLockTest, WorkOnAnIdleJobIsDoneAtOnce) {
  JobLock lock;
  absl::MutexLock look(&lock.mu);
  bool done = false;
  lock.CallWhenIdle([&] { done = true; });
  EXPECT_TRUE(done);
}

// Work that is left while earlier left work makes a pass is done as well.
TEST(JobLockTest, WorkDuringAPassIsLeftToTheCallThatMakesIt) {
  JobLock lock;
  std::vector<int> done;
  {
    JobCall call(&lock);
    const absl::Status made = lock.MakePass([&] {
      absl::MutexLock look(&lock.mu);
      lock.CallWhenIdle([&] {
        EXPECT_TRUE(lock.is_idle());
        done.push_back(1);
        EXPECT_TRUE(lock.MakePass([&] {
                          absl::MutexLock look_again(&lock.mu);
                          lock.CallWhenIdle([&] { done.push_back(3); });
                          return absl::OkStatus();
                        })
                        .ok());
        done.push_back(2);
      });
      EXPECT_TRUE(done.empty());
      return absl::OkStatus();
    });
    EXPECT_TRUE(made.ok());
    EXPECT_TRUE(done.empty()) << "the call may not be at its end";
  }
  EXPECT_EQ(done, (std::vector<int>{1, 2, 3}));
}

// The caller of such work holds the mutex alone, so no end of a JobCall
// follows.
TEST(JobLockTest, WorkThatMakesAPassIsFollowedByWhatWasLeftToIt) {
  JobLock lock;
  std::vector<int> done;
  absl::MutexLock look(&lock.mu);
  lock.CallWhenIdle([&] {
    const absl::Status made = lock.MakePass([&] {
      std::thread second([&] {
        absl::MutexLock look_too(&lock.mu);
        lock.CallWhenIdle([&] {
          EXPECT_TRUE(lock.is_idle());
          done.push_back(2);
        });
      });
      second.join();
      EXPECT_TRUE(done.empty()) << "the pass is being made";
      return absl::OkStatus();
    });
    EXPECT_TRUE(made.ok());
    done.push_back(1);
  });
  EXPECT_EQ(done, (std::vector<int>{1, 2}));
}

}  // namespace
}  // namespace optstate::session
