#ifndef OPTSTATE_SERVER_OS_EVENT_LOOP_H_
#define OPTSTATE_SERVER_OS_EVENT_LOOP_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate::os {

// A loop in which one thread waits for file descriptors and timers and calls
// back.
//
// Order: the callbacks of one wake-up run one after another; a callback may
// unwatch any fd and cancel any timer, which then is not called any more, even
// if it was due in the same wake-up.
// Threads: Post() and Stop() may be called from any thread; everything else
// belongs to the thread in Run(), or to the owner before Run() and after it.
class EventLoop {
 public:
  using FdCallback = std::function<void(uint32_t events)>;
  using TimerId = std::pair<std::chrono::steady_clock::time_point, uint64_t>;

  static absl::StatusOr<std::unique_ptr<EventLoop>> Create();

  // Watches an fd for `events` as in epoll_event; the fd stays the caller's,
  // which must unwatch it before closing it.
  absl::Status Watch(int fd, uint32_t events, FdCallback callback);
  // Changes the events of a watched fd; 0 silences all but errors and hang-up.
  void SetEvents(int fd, uint32_t events);
  void Unwatch(int fd);

  TimerId RunAfter(absl::Duration delay, std::function<void()> callback);
  // Cancels a timer; harmless when that ran or was cancelled before.
  void Cancel(const TimerId& timer);

  // Runs `callback` in the loop; in order for one caller. Callbacks posted
  // after Run() has returned never run.
  void Post(std::function<void()> callback);

  void Run();
  void Stop();

 private:
  struct Watcher {
    uint32_t generation = 0;
    FdCallback callback;
  };

  EventLoop(UniqueFd epoll, UniqueFd wake);

  int WaitMs() const;
  void RunTimers();
  void RunPosted();
  void Dispatch(int fd, uint32_t generation, uint32_t events);

  const UniqueFd epoll_;
  const UniqueFd wake_;  // eventfd: something was posted
  std::unordered_map<int, std::shared_ptr<Watcher>> watchers_;
  // Distinguishes events of a closed fd from those of its reused number in the
  // same wake-up.
  uint32_t next_generation_ = 1;
  std::map<TimerId, std::function<void()>> timers_;
  uint64_t next_timer_ = 0;

  absl::Mutex mutex_;
  std::vector<std::function<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_EVENT_LOOP_H_
