#include "client/endpoint/tunnel_threads.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <list>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {
namespace {

// Time for the daemon to take the last bytes of a connection that was closed
// here.
constexpr absl::Duration kEndTimeout = absl::Seconds(5);

// The events of epoll, which relays speak of, are those of poll.
pollfd Entry(int fd, bool watched, uint32_t events) {
  return {.fd = watched ? fd : -1,
          .events = static_cast<int16_t>(events),
          .revents = 0};
}

// One relay with its thread.
class Tunnel {
 public:
  Tunnel(std::unique_ptr<tls::TlsRelay> relay, UniqueFd stop)
      : relay_(std::move(relay)),
        network_(relay_->network()),
        inside_(relay_->inside()),
        stop_(std::move(stop)) {}

  // Throws std::system_error when there is no thread.
  void Start() {
    thread_ = std::thread([this] { Run(); });
  }
  bool is_over() const { return is_over_; }
  void Stop() {
    const uint64_t one = 1;
    (void)!::write(stop_.get(), &one, sizeof(one));
    thread_.join();
  }
  // Closes a forked child's copies, without any lock or memory: the thread is
  // the parent's alone. The object is leaked.
  void CloseCopies() const {
    if (!is_over_) {
      ::close(network_);
      ::close(inside_);
    }
    ::close(stop_.get());
  }

 private:
  void Run() {
    Relay();
    is_over_ = true;
    relay_.reset();
  }

  void Relay() {
    absl::Time end = absl::InfiniteFuture();
    pollfd entries[3] = {};
    bool goes_on = relay_->Pump();
    while (goes_on) {
      if (relay_->is_ending() && end == absl::InfiniteFuture()) {
        end = absl::Now() + kEndTimeout;
      }
      entries[0] =
          Entry(network_, relay_->watches_network(), relay_->network_events());
      entries[1] =
          Entry(inside_, relay_->watches_inside(), relay_->inside_events());
      entries[2] = Entry(stop_.get(), true, POLLIN);
      const int count = ::poll(entries, 3, WaitMs(end));
      if (entries[2].revents != 0 || absl::Now() >= end) return;
      if (count < 0) continue;  // a signal
      goes_on = relay_->OnEvents(static_cast<uint16_t>(entries[0].revents),
                                 static_cast<uint16_t>(entries[1].revents));
    }
  }

  static int WaitMs(absl::Time end) {
    if (end == absl::InfiniteFuture()) return -1;
    return static_cast<int>(absl::ToInt64Milliseconds(
        absl::Ceil(std::max(end - absl::Now(), absl::ZeroDuration()),
                   absl::Milliseconds(1))));
  }

  std::unique_ptr<tls::TlsRelay> relay_;
  const int network_;
  const int inside_;
  const UniqueFd stop_;  // eventfd
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

// All tunnels of the process.
class Tunnels {
 public:
  static Tunnels& Get() {
    static Tunnels all;
    return all;
  }

  absl::Status Add(std::unique_ptr<Tunnel> tunnel) {
    absl::MutexLock lock(&mutex_);
    tunnels_->remove_if([](const std::unique_ptr<Tunnel>& each) {
      if (each->is_over()) each->Stop();
      return each->is_over();
    });
    // The thread is not one that a program's signals are handled on.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    absl::Status status;
    try {
      tunnel->Start();
    } catch (const std::system_error& error) {
      status = absl::ResourceExhaustedError(
          absl::StrCat("no thread for a TLS connection: ", error.what()));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (status.ok()) tunnels_->push_back(std::move(tunnel));
    return status;
  }

 private:
  using List = std::list<std::unique_ptr<Tunnel>>;

  Tunnels() {
    pthread_atfork([] { Get().mutex_.Lock(); }, [] { Get().mutex_.Unlock(); },
                   [] { Get().AfterFork(); });
  }
  ~Tunnels() {
    absl::MutexLock lock(&mutex_);
    for (const auto& tunnel : *tunnels_) tunnel->Stop();
    delete tunnels_;
    tunnels_ = new List;
  }

  void AfterFork() ABSL_UNLOCK_FUNCTION(mutex_) {
    for (const auto& tunnel : *tunnels_) tunnel->CloseCopies();
    tunnels_ = new List;  // the former one is leaked, see CloseCopies()
    mutex_.Unlock();
  }

  absl::Mutex mutex_;
  List* tunnels_ ABSL_GUARDED_BY(mutex_) = new List;
};

}  // namespace

absl::Status RunRelay(std::unique_ptr<tls::TlsRelay> relay) {
  UniqueFd stop(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.ok()) return OsError(errno, "eventfd");
  return Tunnels::Get().Add(
      std::make_unique<Tunnel>(std::move(relay), std::move(stop)));
}

}  // namespace optstate::client
