#include "client/endpoint/dial.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/endpoint/interrupt.h"
#include "client/endpoint/tls_tunnel.h"
#include "proto/types/os_error.h"
#include "proto/types/path_owners.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// The keepalive: a peer that vanished silently (power, cable) is noticed after
// about this long without an answer.
constexpr int kTcpKeepAliveIdleS = 15;
constexpr int kTcpUserTimeoutMs = 60'000;
// The time given to one address that does not answer. The next address may
// answer, and a new attempt reaches a link that is back sooner than the
// kernel's ever rarer ones.
constexpr absl::Duration kAttemptMax = absl::Seconds(5);

timeval Until(absl::Time deadline) {
  // 0 would mean "for ever".
  const absl::Duration left =
      std::max(deadline - absl::Now(), absl::Milliseconds(1));
  return absl::ToTimeval(std::min(left, absl::Hours(24)));
}

absl::StatusOr<UniqueFd> DialUnix(const Endpoint& endpoint,
                                  absl::Time deadline) {
  // The process that listens there receives all data that this rank trains
  // with.
  std::error_code error;
  const std::string path =
      std::filesystem::absolute(endpoint.path, error).string();
  if (error) return OsError(error.value(), endpoint.path);
  OPTSTATE_RETURN_IF_ERROR(CheckPathOwners(path, PathOwners::kTrusted));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.ok()) return OsError(errno, "socket(AF_UNIX)");
  // connect() waits this long when the daemon's backlog is full.
  const timeval timeout = Until(deadline);
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, endpoint.path.data(),
              std::min(endpoint.path.size(), sizeof(address.sun_path) - 1));
  int result;
  do {
    result = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                     sizeof(address));
  } while (result != 0 && errno == EINTR);
  if (result == 0) {
    const timeval never = {};
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &never, sizeof(never));
    return fd;
  }
  if (errno == EAGAIN) {
    return absl::DeadlineExceededError(absl::StrCat(
        "connect(", endpoint.path, "): the daemon does not accept"));
  }
  return OsError(errno, absl::StrCat("connect(", endpoint.path, ")"));
}

absl::Status AwaitConnected(int fd, absl::Time deadline,
                            const InterruptCheck& interrupted,
                            const std::string& what) {
  while (true) {
    pollfd entry = {.fd = fd, .events = POLLOUT, .revents = 0};
    const absl::Duration left = std::clamp(
        deadline - absl::Now(), absl::ZeroDuration(), kInterruptSlice);
    const int count = poll(&entry, 1,
                           static_cast<int>(absl::ToInt64Milliseconds(
                               absl::Ceil(left, absl::Milliseconds(1)))));
    if (count > 0) break;
    if (count < 0 && errno != EINTR) return OsError(errno, "poll");
    OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat(what, ": no answer"));
    }
  }
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
    return OsError(errno, "getsockopt(SO_ERROR)");
  }
  return error == 0 ? absl::OkStatus() : OsError(error, what);
}

// Makes the socket blocking again, without Nagle's algorithm, and sure to
// notice a vanished peer.
void Tune(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kTcpKeepAliveIdleS,
             sizeof(kTcpKeepAliveIdleS));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kTcpUserTimeoutMs,
             sizeof(kTcpUserTimeoutMs));
}

absl::StatusOr<UniqueFd> DialAddress(const addrinfo& address,
                                     const std::string& what,
                                     absl::Time deadline,
                                     const InterruptCheck& interrupted) {
  UniqueFd fd(
      socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.ok()) return OsError(errno, "socket");
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) return OsError(errno, what);
    OPTSTATE_RETURN_IF_ERROR(
        AwaitConnected(fd.get(), deadline, interrupted, what));
  }
  Tune(fd.get());
  return fd;
}

// Returns "connect(node7:7600)", and for a host name the address too.
std::string Attempt(const Endpoint& endpoint, const addrinfo& address) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address.ai_addr, address.ai_addrlen, host, sizeof(host), nullptr,
              0, NI_NUMERICHOST);
  const std::string at = endpoint.host == host ? "" : absl::StrCat(", ", host);
  return absl::StrCat("connect(", endpoint.host, ":", endpoint.port, at, ")");
}

// Makes one attempt at each address; returns the error of an address that
// answered, if any did.
absl::StatusOr<UniqueFd> DialEach(const Endpoint& endpoint,
                                  const addrinfo* addresses,
                                  absl::Time deadline,
                                  const InterruptCheck& interrupted) {
  absl::Status status =
      absl::NotFoundError(absl::StrCat("host ", endpoint.host, ": no address"));
  bool has_answered = false;
  for (const addrinfo* at = addresses; at != nullptr; at = at->ai_next) {
    absl::StatusOr<UniqueFd> fd =
        DialAddress(*at, Attempt(endpoint, *at),
                    std::min(deadline, absl::Now() + kAttemptMax), interrupted);
    if (fd.ok() || absl::IsCancelled(fd.status())) return fd;
    const bool answered = !absl::IsDeadlineExceeded(fd.status());
    if (answered || !has_answered) status = fd.status();
    has_answered |= answered;
  }
  return status;
}

absl::StatusOr<UniqueFd> DialTcp(const Endpoint& endpoint, absl::Time deadline,
                                 const InterruptCheck& interrupted) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &hints, &found);
  if (error == EAI_SYSTEM) return OsError(errno, "getaddrinfo");
  if (error == EAI_AGAIN) {
    return absl::UnavailableError(
        absl::StrCat("host ", endpoint.host, ": ", gai_strerror(error)));
  }
  if (error != 0) {
    return absl::NotFoundError(
        absl::StrCat("host ", endpoint.host, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found,
                                                                &freeaddrinfo);
  while (true) {
    absl::StatusOr<UniqueFd> fd =
        DialEach(endpoint, found, deadline, interrupted);
    if (!absl::IsDeadlineExceeded(fd.status()) || absl::Now() >= deadline) {
      return fd;
    }
  }
}

}  // namespace

absl::StatusOr<UniqueFd> Dial(const Endpoint& endpoint, absl::Time deadline,
                              const InterruptCheck& interrupted) {
  switch (endpoint.kind) {
    case Endpoint::Kind::kShm:
    case Endpoint::Kind::kGrpcUnix:
      return DialUnix(endpoint, deadline);
    case Endpoint::Kind::kGrpcTcp:
      return DialTcp(endpoint, deadline, interrupted);
    case Endpoint::Kind::kGrpcTls: {
      OPTSTATE_ASSIGN_OR_RETURN(UniqueFd socket,
                                DialTcp(endpoint, deadline, interrupted));
      return OpenTlsTunnel(std::move(socket), endpoint, deadline, interrupted);
    }
    case Endpoint::Kind::kEmbedded:
      break;
  }
  return absl::InternalError("an embedded daemon is started, not dialled");
}

}  // namespace optstate::client
