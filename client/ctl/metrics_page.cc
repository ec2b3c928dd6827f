#include "client/ctl/metrics_page.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

constexpr char kRequest[] =
    "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
// The answer's headers come before the page.
constexpr size_t kHeadBytesMax = 64 << 10;

std::string FlagIn(const std::string& command_line) {
  const std::vector<std::string> words = absl::StrSplit(command_line, '\0');
  for (size_t i = 1; i < words.size(); ++i) {
    absl::string_view word = words[i];
    if (word == "--metrics" && i + 1 < words.size()) return words[i + 1];
    if (absl::ConsumePrefix(&word, "--metrics=")) return std::string(word);
  }
  return "";
}

// Returns the value behind `address:` in a line of YAML; "": it has none.
std::string AddressIn(absl::string_view line) {
  constexpr absl::string_view kKey = "address:";
  const size_t at = line.find(kKey);
  if (at == absl::string_view::npos) return "";
  absl::string_view value =
      absl::StripAsciiWhitespace(line.substr(at + kKey.size()));
  if (value.empty()) return "";
  const char quote = value.front();
  if (quote == '"' || quote == '\'') {
    value.remove_prefix(1);
    return std::string(value.substr(0, value.find(quote)));
  }
  return std::string(value.substr(0, value.find_first_of(" \t#,}")));
}

// Returns metrics.address of a configuration file, which the daemon has
// checked.
std::string AddressInConfig(absl::string_view config) {
  bool is_inside = false;
  for (absl::string_view line : absl::StrSplit(config, '\n')) {
    const absl::string_view text = absl::StripAsciiWhitespace(line);
    if (text.empty() || text.front() == '#') continue;
    if (line.front() != ' ') is_inside = absl::ConsumePrefix(&line, "metrics:");
    if (!is_inside) continue;
    std::string address = AddressIn(line);
    if (!address.empty()) return address;
  }
  return "";
}

// Waits until the socket can be read, or written.
absl::Status Await(int fd, int16_t events, absl::Time deadline) {
  while (true) {
    const double left_ms =
        std::ceil(absl::ToDoubleMilliseconds(deadline - absl::Now()));
    if (left_ms <= 0) return absl::DeadlineExceededError("no answer in time");
    pollfd polled = {.fd = fd, .events = events, .revents = 0};
    if (::poll(&polled, 1, static_cast<int>(std::fmin(left_ms, 1e6))) > 0) {
      return absl::OkStatus();
    }
  }
}

absl::StatusOr<UniqueFd> ConnectTo(const sockaddr* address, socklen_t size,
                                   absl::Time deadline) {
  UniqueFd fd(::socket(address->sa_family,
                       SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.ok()) return OsError(errno, "socket");
  if (::connect(fd.get(), address, size) == 0) return fd;
  if (errno != EINPROGRESS) return OsError(errno, "connect");
  OPTSTATE_RETURN_IF_ERROR(Await(fd.get(), POLLOUT, deadline));
  int error = 0;
  socklen_t error_size = sizeof(error);
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &error_size) != 0) {
    return OsError(errno, "getsockopt");
  }
  if (error != 0) return OsError(error, "connect");
  return fd;
}

absl::StatusOr<UniqueFd> ConnectUnix(absl::string_view path,
                                     absl::Time deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("it is no path of a socket");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return ConnectTo(reinterpret_cast<const sockaddr*>(&address), sizeof(address),
                   deadline);
}

absl::StatusOr<UniqueFd> ConnectTcp(absl::string_view address,
                                    absl::Time deadline) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) {
    return absl::InvalidArgumentError("it is neither HOST:PORT nor unix:PATH");
  }
  absl::string_view host = address.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(
      std::string(host).c_str(), std::string(address.substr(colon + 1)).c_str(),
      &hints, &found);
  if (error != 0) return absl::InvalidArgumentError(::gai_strerror(error));
  const absl::Cleanup free_found = [found] { ::freeaddrinfo(found); };
  return ConnectTo(found->ai_addr, found->ai_addrlen, deadline);
}

absl::Status Send(int fd, absl::string_view bytes, absl::Time deadline) {
  while (!bytes.empty()) {
    OPTSTATE_RETURN_IF_ERROR(Await(fd, POLLOUT, deadline));
    const ssize_t count = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) return OsError(errno, "send");
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

// Receives until the server closes, as far as `bytes_max`.
absl::StatusOr<std::string> Receive(int fd, size_t bytes_max,
                                    absl::Time deadline) {
  std::string all;
  std::array<char, 65536> buffer;
  while (all.size() < bytes_max) {
    OPTSTATE_RETURN_IF_ERROR(Await(fd, POLLIN, deadline));
    const ssize_t count = ::recv(fd, buffer.data(), buffer.size(), 0);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) return OsError(errno, "recv");
    if (count == 0) break;
    all.append(buffer.data(), static_cast<size_t>(count));
  }
  return all;
}

// Returns the page in an answer with code 200.
absl::StatusOr<std::string> PageIn(const std::string& answer,
                                   size_t bytes_max) {
  const absl::string_view first =
      absl::string_view(answer).substr(0, answer.find("\r\n"));
  const size_t head = answer.find("\r\n\r\n");
  if (!absl::StartsWith(first, "HTTP/1.1 200") || head == std::string::npos) {
    return absl::UnavailableError(absl::StrCat(
        "it answers with \"", first.substr(0, 100), "\", not with the page"));
  }
  return answer.substr(head + 4, bytes_max);
}

absl::StatusOr<std::string> Read(absl::string_view address, size_t bytes_max,
                                 absl::Time deadline) {
  UniqueFd fd;
  if (absl::ConsumePrefix(&address, "unix:")) {
    OPTSTATE_ASSIGN_OR_RETURN(fd, ConnectUnix(address, deadline));
  } else {
    OPTSTATE_ASSIGN_OR_RETURN(fd, ConnectTcp(address, deadline));
  }
  OPTSTATE_RETURN_IF_ERROR(Send(fd.get(), kRequest, deadline));
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::string answer,
      Receive(fd.get(), bytes_max + kHeadBytesMax, deadline));
  return PageIn(answer, bytes_max);
}

}  // namespace

std::string MetricsAddressIn(const std::string& command_line,
                             absl::string_view config) {
  std::string flag = FlagIn(command_line);
  return flag.empty() ? AddressInConfig(config) : flag;
}

absl::StatusOr<std::string> ReadMetrics(const std::string& address,
                                        size_t bytes_max,
                                        absl::Duration timeout) {
  absl::StatusOr<std::string> page =
      Read(address, bytes_max, absl::Now() + timeout);
  if (!page.ok()) return Annotate(page.status(), address);
  return page;
}

}  // namespace optstate::ctl
