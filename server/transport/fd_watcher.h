#ifndef OPTSTATE_SERVER_TRANSPORT_FD_WATCHER_H_
#define OPTSTATE_SERVER_TRANSPORT_FD_WATCHER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/unique_fd.h"

namespace optstate::transport {

// Watches the sockets and processes of sessions whose own threads are busy with
// something else (a ring, a step): one thread for all of them.
//
// Threads: thread-safe. Callbacks run on the watcher's thread, one at a time,
// must be short and must not call the watcher.
class FdWatcher {
 public:
  static absl::StatusOr<std::unique_ptr<FdWatcher>> Start();
  ~FdWatcher();
  FdWatcher(const FdWatcher&) = delete;
  FdWatcher& operator=(const FdWatcher&) = delete;

  // Names one watch; never reused, as fd numbers are.
  using Id = uint64_t;

  // Calls `on_event` when `fd` is readable or hung up, once; then again after
  // each Rearm(). `fd` stays the caller's and open until Forget().
  absl::StatusOr<Id> Watch(int fd, std::function<void()> on_event);
  // Does the same, and rearms the watch as long as `on_event` returns true.
  absl::StatusOr<Id> WatchWhile(int fd, std::function<bool()> on_event);
  void Rearm(Id id);
  // Ends a watch. Once this returns, the callback does not run and will not.
  void Forget(Id id);

 private:
  struct Entry {
    int fd;
    std::function<bool()> on_event;
  };

  FdWatcher(UniqueFd epoll, UniqueFd stop);
  void RearmLocked(Id id, int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Loop();

  const UniqueFd epoll_;
  const UniqueFd stop_;
  absl::Mutex mutex_;
  absl::flat_hash_map<Id, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  Id last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_FD_WATCHER_H_
