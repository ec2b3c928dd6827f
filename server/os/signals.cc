#include "server/os/signals.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::os {
namespace {

sigset_t Watched() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::sigaddset(&set, SIGINT);
  ::sigaddset(&set, SIGHUP);
  return set;
}

}  // namespace

void BlockSignals() {
  const sigset_t set = Watched();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
}

absl::StatusOr<std::unique_ptr<SignalWatch>> SignalWatch::Start(
    EventLoop* loop, std::function<void(int signal)> on_signal) {
  const sigset_t set = Watched();
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd.ok()) return OsError(errno, "signalfd");
  const int raw = fd.get();
  OPTSTATE_RETURN_IF_ERROR(loop->Watch(
      raw, EPOLLIN, [raw, on_signal = std::move(on_signal)](uint32_t) {
        signalfd_siginfo info;
        while (::read(raw, &info, sizeof(info)) == sizeof(info)) {
          on_signal(static_cast<int>(info.ssi_signo));
        }
      }));
  return std::unique_ptr<SignalWatch>(new SignalWatch(loop, std::move(fd)));
}

SignalWatch::SignalWatch(EventLoop* loop, UniqueFd fd)
    : loop_(loop), fd_(std::move(fd)) {}

SignalWatch::~SignalWatch() { loop_->Unwatch(fd_.get()); }

}  // namespace optstate::os
