#ifndef OPTSTATE_SERVER_SESSION_TESTING_HELD_READ_H_
#define OPTSTATE_SERVER_SESSION_TESTING_HELD_READ_H_

#include <atomic>
#include <functional>

#include "absl/synchronization/notification.h"

namespace optstate::session {

// Has `hook` called before each read of a file by the blocking I/O engine, on
// the thread that reads. One at a time; must outlive these reads.
class ReadHook {
 public:
  explicit ReadHook(std::function<void()> hook);
  ~ReadHook();
  ReadHook(const ReadHook&) = delete;
  ReadHook& operator=(const ReadHook&) = delete;

 private:
  const std::function<void()> hook_;
};

// Holds the first read of a file from now on until Release().
class HeldRead {
 public:
  // Waits until a read is held.
  void Await() { begun_.WaitForNotification(); }
  void Release() { released_.Notify(); }

 private:
  std::atomic<bool> is_first_ = true;
  absl::Notification begun_, released_;
  const ReadHook hook_{[this] {
    if (!is_first_.exchange(false)) return;
    begun_.Notify();
    released_.WaitForNotification();
  }};
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_HELD_READ_H_
