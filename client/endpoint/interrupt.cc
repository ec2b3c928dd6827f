#include "client/endpoint/interrupt.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::client {

absl::Status CheckInterrupted(const InterruptCheck& interrupted) {
  if (!interrupted || !interrupted()) return absl::OkStatus();
  return absl::CancelledError("interrupted while waiting for the engine");
}

absl::Status AwaitReadable(int fd, absl::Time deadline,
                           const InterruptCheck& interrupted) {
  while (absl::Now() < deadline) {
    const absl::Duration slice =
        std::min(deadline - absl::Now(), kInterruptSlice);
    pollfd entry = {.fd = fd, .events = POLLIN, .revents = 0};
    const int count = poll(&entry, 1,
                           static_cast<int>(absl::ToInt64Milliseconds(
                               absl::Ceil(slice, absl::Milliseconds(1)))));
    if (count > 0) break;
    if (count < 0 && errno != EINTR) return OsError(errno, "poll");
    OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
