#include "client/ctl/interrupt.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <utility>

#include "absl/time/clock.h"
#include "proto/types/os_error.h"

namespace optstate::ctl {
namespace {

std::atomic<int> event = -1;

void OnSignal(int /*signal*/) {
  const int error = errno;
  const uint64_t one = 1;
  // Nothing can be done about an error here: the next signal ends the process.
  const ssize_t ignored [[maybe_unused]] =
      ::write(event.load(), &one, sizeof(one));
  errno = error;
}

}  // namespace

absl::StatusOr<Interrupt> Interrupt::Install() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.ok()) return OsError(errno, "eventfd");
  event = fd.get();
  struct sigaction action = {};
  action.sa_handler = &OnSignal;
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  for (const int signal : {SIGINT, SIGTERM}) {
    if (::sigaction(signal, &action, nullptr) != 0) {
      return OsError(errno, "sigaction");
    }
  }
  return Interrupt(std::move(fd));
}

bool Interrupt::Await(absl::Duration time) const {
  pollfd polled = {.fd = fd_.get(), .events = POLLIN, .revents = 0};
  const absl::Time until = absl::Now() + time;
  while (true) {
    const double left_ms =
        std::ceil(absl::ToDoubleMilliseconds(until - absl::Now()));
    const int ready =
        ::poll(&polled, 1, static_cast<int>(std::fmax(left_ms, 0)));
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) return true;
  }
}

}  // namespace optstate::ctl
