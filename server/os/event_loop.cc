#include "server/os/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::os {
namespace {

using Clock = std::chrono::steady_clock;

constexpr absl::Duration kDelayMax = absl::Hours(24 * 365);

uint64_t Key(int fd, uint32_t generation) {
  return (uint64_t{generation} << 32) | static_cast<uint32_t>(fd);
}

}  // namespace

absl::StatusOr<std::unique_ptr<EventLoop>> EventLoop::Create() {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.ok()) return OsError(errno, "epoll_create1");
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.ok()) return OsError(errno, "eventfd");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = Key(wake.get(), 0);
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return OsError(errno, "epoll_ctl of an eventfd");
  }
  return std::unique_ptr<EventLoop>(
      new EventLoop(std::move(epoll), std::move(wake)));
}

EventLoop::EventLoop(UniqueFd epoll, UniqueFd wake)
    : epoll_(std::move(epoll)), wake_(std::move(wake)) {}

absl::Status EventLoop::Watch(int fd, uint32_t events, FdCallback callback) {
  auto watcher = std::make_shared<Watcher>();
  watcher->generation = next_generation_++;
  watcher->callback = std::move(callback);
  epoll_event event{};
  event.events = events;
  event.data.u64 = Key(fd, watcher->generation);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return OsError(errno, absl::StrCat("epoll_ctl of fd ", fd));
  }
  watchers_[fd] = std::move(watcher);
  return absl::OkStatus();
}

void EventLoop::SetEvents(int fd, uint32_t events) {
  const auto found = watchers_.find(fd);
  if (found == watchers_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = Key(fd, found->second->generation);
  // The call cannot fail for an fd that is in the set.
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::Unwatch(int fd) {
  if (watchers_.erase(fd) == 0) return;
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

EventLoop::TimerId EventLoop::RunAfter(absl::Duration delay,
                                       std::function<void()> callback) {
  // An infinite delay would overflow into the past.
  const absl::Duration bounded = std::min(delay, kDelayMax);
  const TimerId id(Clock::now() + absl::ToChronoNanoseconds(bounded),
                   next_timer_++);
  timers_.emplace(id, std::move(callback));
  return id;
}

void EventLoop::Cancel(const TimerId& timer) { timers_.erase(timer); }

void EventLoop::Post(std::function<void()> callback) {
  {
    absl::MutexLock lock(&mutex_);
    posted_.push_back(std::move(callback));
  }
  const uint64_t one = 1;
  // The write fails only when the counter is full, and then the loop wakes
  // anyway.
  (void)!::write(wake_.get(), &one, sizeof(one));
}

void EventLoop::Stop() {
  Post([this] {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  });
}

int EventLoop::WaitMs() const {
  if (timers_.empty()) return -1;
  const auto left = timers_.begin()->first.first - Clock::now();
  if (left <= Clock::duration::zero()) return 0;
  // The timeout is rounded up: waking early would spin.
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
  return static_cast<int>(std::min<int64_t>(ms, 60 * 1000));
}

void EventLoop::RunTimers() {
  const auto now = Clock::now();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    auto node = timers_.extract(timers_.begin());
    node.mapped()();
  }
}

void EventLoop::RunPosted() {
  uint64_t count = 0;
  (void)!::read(wake_.get(), &count, sizeof(count));
  std::vector<std::function<void()>> posted;
  {
    absl::MutexLock lock(&mutex_);
    posted.swap(posted_);
  }
  for (auto& callback : posted) callback();
}

void EventLoop::Dispatch(int fd, uint32_t generation, uint32_t events) {
  const auto found = watchers_.find(fd);
  if (found == watchers_.end()) return;
  if (found->second->generation != generation) return;
  // The watcher is kept alive over a callback that unwatches itself.
  const std::shared_ptr<Watcher> watcher = found->second;
  watcher->callback(events);
}

void EventLoop::Run() {
  epoll_event events[64];
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (stopped_) return;
    }
    const int count = ::epoll_wait(epoll_.get(), events, 64, WaitMs());
    for (int i = 0; i < count; ++i) {
      const int fd = static_cast<int>(events[i].data.u64 & 0xffffffffu);
      if (fd == wake_.get()) {
        RunPosted();
      } else {
        Dispatch(fd, static_cast<uint32_t>(events[i].data.u64 >> 32),
                 events[i].events);
      }
    }
    RunTimers();
  }
}

}  // namespace optstate::os
