#include "server/observe/sd_notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"

namespace optstate::observe {

absl::Status NotifyServiceManager(absl::string_view state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || path[0] == '\0') return absl::OkStatus();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t size = std::strlen(path);
  if (size >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("NOTIFY_SOCKET is too long");
  }
  std::memcpy(address.sun_path, path, size);
  // '@' stands for the zero byte of an abstract address.
  if (path[0] == '@') address.sun_path[0] = '\0';
  const UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.ok()) return OsError(errno, "socket");
  const auto address_size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + size);
  if (::sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL,
               reinterpret_cast<const sockaddr*>(&address), address_size) < 0) {
    return OsError(errno, absl::StrCat("send to NOTIFY_SOCKET ", path));
  }
  return absl::OkStatus();
}

absl::Duration WatchdogLimit() {
  const char* limit = std::getenv("WATCHDOG_USEC");
  const char* pid = std::getenv("WATCHDOG_PID");
  int64_t limit_us = 0;
  int64_t process = 0;
  if (limit == nullptr || !absl::SimpleAtoi(limit, &limit_us) ||
      limit_us <= 0) {
    return absl::InfiniteDuration();
  }
  // The variables are inherited; they are for one process.
  if (pid != nullptr &&
      (!absl::SimpleAtoi(pid, &process) || process != ::getpid())) {
    return absl::InfiniteDuration();
  }
  return absl::Microseconds(limit_us);
}

}  // namespace optstate::observe
