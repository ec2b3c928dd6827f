#include "server/transport/fd_watcher.h"

#include <sys/eventfd.h>

#include <atomic>
#include <memory>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace optstate::transport {
namespace {

TEST(FdWatcherTest, CallsOnceForEachArming) {
  auto watcher = FdWatcher::Start().value();
  UniqueFd event(::eventfd(1, EFD_CLOEXEC));
  absl::Mutex mutex;
  int calls = 0;
  const auto await_calls = [&](int count) {
    const auto reached = [&] { return calls >= count; };
    absl::MutexLock lock(&mutex, absl::Condition(&reached));
    EXPECT_EQ(calls, count);
  };
  const auto id = watcher->Watch(event.get(), [&] {
    absl::MutexLock lock(&mutex);
    ++calls;
  });
  ASSERT_TRUE(id.ok());
  await_calls(1);
  // The fd stays readable, and is not watched any more: later events are seen
  // while this one is not.
  UniqueFd other(::eventfd(1, EFD_CLOEXEC));
  absl::Notification seen;
  ASSERT_TRUE(watcher->Watch(other.get(), [&] { seen.Notify(); }).ok());
  seen.WaitForNotification();
  await_calls(1);
  watcher->Rearm(*id);
  await_calls(2);
}

TEST(FdWatcherTest, NoCallAfterForget) {
  auto watcher = FdWatcher::Start().value();
  for (int i = 0; i < 1000; ++i) {
    UniqueFd event(::eventfd(0, EFD_CLOEXEC));
    auto alive = std::make_unique<std::atomic<bool>>(true);
    const auto id =
        watcher->Watch(event.get(), [&alive] { alive->store(false); });
    ASSERT_TRUE(id.ok());
    ::eventfd_write(event.get(), 1);
    watcher->Forget(*id);
    alive.reset();  // a later call would write to freed memory
  }
}

TEST(FdWatcherTest, UnknownIdsAreIgnored) {
  auto watcher = FdWatcher::Start().value();
  watcher->Rearm(99);
  watcher->Forget(99);
}

TEST(FdWatcherTest, AnFdThatIsNoneIsAnError) {
  auto watcher = FdWatcher::Start().value();
  EXPECT_FALSE(watcher->Watch(-1, [] {}).ok());
}

}  // namespace
}  // namespace optstate::transport
