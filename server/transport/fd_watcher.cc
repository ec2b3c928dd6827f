#include "server/transport/fd_watcher.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

#include "proto/types/os_error.h"

namespace optstate::transport {
namespace {

constexpr uint64_t kStopId = 0;
constexpr uint32_t kEvents = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;

}  // namespace

absl::StatusOr<std::unique_ptr<FdWatcher>> FdWatcher::Start() {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.ok()) return OsError(errno, "epoll_create1");
  UniqueFd stop(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.ok()) return OsError(errno, "eventfd");
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = kStopId;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, stop.get(), &event) != 0) {
    return OsError(errno, "epoll_ctl(eventfd)");
  }
  return std::unique_ptr<FdWatcher>(
      new FdWatcher(std::move(epoll), std::move(stop)));
}

FdWatcher::FdWatcher(UniqueFd epoll, UniqueFd stop)
    : epoll_(std::move(epoll)), stop_(std::move(stop)) {
  thread_ = std::thread([this] { Loop(); });
}

FdWatcher::~FdWatcher() {
  ::eventfd_write(stop_.get(), 1);
  thread_.join();
}

absl::StatusOr<FdWatcher::Id> FdWatcher::Watch(int fd,
                                               std::function<void()> on_event) {
  return WatchWhile(fd, [on_event = std::move(on_event)] {
    on_event();
    return false;
  });
}

absl::StatusOr<FdWatcher::Id> FdWatcher::WatchWhile(
    int fd, std::function<bool()> on_event) {
  absl::MutexLock lock(&mutex_);
  const Id id = ++last_id_;
  epoll_event event = {};
  event.events = kEvents;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return OsError(errno, "epoll_ctl(EPOLL_CTL_ADD)");
  }
  entries_.emplace(id, Entry{fd, std::move(on_event)});
  return id;
}

void FdWatcher::Rearm(Id id) {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(id);
  if (entry != entries_.end()) RearmLocked(id, entry->second.fd);
}

void FdWatcher::RearmLocked(Id id, int fd) {
  epoll_event event = {};
  event.events = kEvents;
  event.data.u64 = id;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void FdWatcher::Forget(Id id) {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, entry->second.fd, nullptr);
  entries_.erase(entry);
}

void FdWatcher::Loop() {
  ::pthread_setname_np(::pthread_self(), "fd-watcher");
  epoll_event events[64];
  while (true) {
    const int count = ::epoll_wait(epoll_.get(), events, 64, -1);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == kStopId) return;
      // An event may have been read just before its watch was forgotten.
      absl::MutexLock lock(&mutex_);
      const auto entry = entries_.find(events[i].data.u64);
      if (entry != entries_.end() && entry->second.on_event()) {
        RearmLocked(entry->first, entry->second.fd);
      }
    }
  }
}

}  // namespace optstate::transport
