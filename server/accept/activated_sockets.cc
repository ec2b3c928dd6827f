#include "server/accept/activated_sockets.h"

#include <fcntl.h>
#include <netdb.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/config/listen_address.h"

namespace optstate::accept {
namespace {

constexpr char kPid[] = "LISTEN_PID";
constexpr char kCount[] = "LISTEN_FDS";
constexpr char kNames[] = "LISTEN_FDNAMES";
constexpr int kFirstFd = 3;    // SD_LISTEN_FDS_START
constexpr int kFdsMax = 1024;  // more are a mistake
constexpr char kUnix[] = "unix:";

// Returns an environment variable, and removes it.
std::string Take(const char* variable) {
  const char* value = std::getenv(variable);
  std::string text = value == nullptr ? "" : value;
  ::unsetenv(variable);
  return text;
}

std::string Describe(const ActivatedSocket& socket) {
  return absl::StrCat("the service manager passes fd ", socket.fd, " (\"",
                      socket.name, "\")");
}

absl::Status Refuse(const ActivatedSocket& socket, absl::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat(Describe(socket), ", ", why));
}

absl::StatusOr<int> OptionOf(const ActivatedSocket& socket, int option) {
  int value = 0;
  socklen_t size = sizeof(value);
  if (::getsockopt(socket.fd, SOL_SOCKET, option, &value, &size) == 0) {
    return value;
  }
  return Refuse(socket, absl::StrCat("which is no socket: ",
                                     OsError(errno, "getsockopt").message()));
}

absl::Status CheckListens(const ActivatedSocket& socket) {
  OPTSTATE_ASSIGN_OR_RETURN(const int type, OptionOf(socket, SO_TYPE));
  if (type != SOCK_STREAM) {
    return Refuse(socket,
                  "which is no stream socket: name it with ListenStream= in "
                  "the socket unit");
  }
  OPTSTATE_ASSIGN_OR_RETURN(const int listens, OptionOf(socket, SO_ACCEPTCONN));
  if (listens != 0) return absl::OkStatus();
  return Refuse(socket,
                "which does not listen: Accept=no is needed in the socket "
                "unit");
}

// Returns the address that a socket is bound to, as in the configuration.
absl::StatusOr<std::string> BoundTo(const ActivatedSocket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(socket.fd, reinterpret_cast<sockaddr*>(&address), &size) !=
      0) {
    return OsError(errno, absl::StrCat(Describe(socket), ": getsockname"));
  }
  if (address.ss_family == AF_UNIX) {
    const auto& local = reinterpret_cast<const sockaddr_un&>(address);
    const size_t bytes = size > offsetof(sockaddr_un, sun_path)
                             ? size - offsetof(sockaddr_un, sun_path)
                             : 0;
    // A name that begins with a zero byte is none of the file system.
    if (bytes > 1 && local.sun_path[0] == '\0') {
      return absl::StrCat(kUnix, "@",
                          std::string(local.sun_path + 1, bytes - 1));
    }
    return absl::StrCat(
        kUnix, std::string(local.sun_path, ::strnlen(local.sun_path, bytes)));
  }
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) {
    return Refuse(socket, absl::StrCat("of address family ", address.ss_family,
                                       ": a unix or TCP socket is needed"));
  }
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  const int error = ::getnameinfo(reinterpret_cast<sockaddr*>(&address), size,
                                  host, sizeof(host), port, sizeof(port),
                                  NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) return absl::InternalError(::gai_strerror(error));
  return address.ss_family == AF_INET6 ? absl::StrCat("[", host, "]:", port)
                                       : absl::StrCat(host, ":", port);
}

// Returns the configured addresses that a socket of this name may be bound to.
absl::StatusOr<std::vector<std::string>> AddressesFor(
    const ActivatedSocket& socket, const v1::DaemonConfig& config) {
  if (socket.name == kActivatedSocket) {
    return std::vector<std::string>{absl::StrCat(kUnix, config.socket())};
  }
  if (socket.name == kActivatedListen) {
    return std::vector<std::string>{config.listen().begin(),
                                    config.listen().end()};
  }
  return Refuse(socket,
                absl::StrCat("and knows no such name: set FileDescriptorName=",
                             kActivatedSocket,
                             " in the unit of the address of "
                             "`socket`, and FileDescriptorName=",
                             kActivatedListen, " in those of `listen`"));
}

absl::Status CheckAddress(const ActivatedSocket& socket,
                          const std::string& bound,
                          const v1::DaemonConfig& config) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::string> addresses,
                            AddressesFor(socket, config));
  if (absl::c_linear_search(addresses, bound)) return absl::OkStatus();
  const std::string configured =
      addresses.empty() ? "no address" : absl::StrJoin(addresses, ", ");
  return Refuse(socket,
                absl::StrCat("bound to ", bound, ", and the configuration has ",
                             configured, " there (", socket.name,
                             "): make ListenStream= of the socket unit and the "
                             "configuration say the same"));
}

// Returns why the file of a unix socket must not be listened on. Its
// permissions count from the moment in which the service manager has made it,
// so that wider ones are not mended afterwards.
absl::Status CheckFile(const ActivatedSocket& socket, const std::string& path,
                       uint32_t mode) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) {
    return Refuse(
        socket,
        absl::StrCat("whose file was removed (",
                     OsError(errno, absl::StrCat("stat ", path)).message(),
                     "): restart the socket unit"));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return Refuse(socket, absl::StrCat("and ", path,
                                       " is no socket any more: remove it, and "
                                       "restart the socket unit"));
  }
  const uint32_t found = info.st_mode & 07777;
  if (found == mode) return absl::OkStatus();
  return Refuse(
      socket,
      absl::StrFormat("whose file %s has the permissions %04o, and the "
                      "configuration has socket_mode %04o: make SocketMode= of "
                      "the socket unit and the configuration say the same",
                      path, found, mode));
}

absl::StatusOr<std::unique_ptr<Listener>> Adopt(const ActivatedSocket& socket,
                                                const std::string& bound,
                                                const v1::DaemonConfig& config,
                                                UniqueFd fd) {
  OPTSTATE_ASSIGN_OR_RETURN(const config::ListenAddress address,
                            config::ParseListenAddress(bound));
  if (!address.unix_path.empty()) {
    OPTSTATE_RETURN_IF_ERROR(
        CheckFile(socket, address.unix_path, config.socket_mode()));
  }
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    return OsError(errno, absl::StrCat(Describe(socket), ": fcntl"));
  }
  // Without a lock the file is the service manager's.
  return Listener::Inherit(address, std::move(fd), UniqueFd(),
                           static_cast<mode_t>(config.socket_mode()));
}

}  // namespace

absl::StatusOr<std::vector<ActivatedSocket>> TakeActivatedSockets() {
  const std::string pid = Take(kPid);
  const std::string count_text = Take(kCount);
  const std::string names_text = Take(kNames);
  Take("LISTEN_PIDFDID");  // of newer service managers
  int64_t process = 0;
  // The variables are inherited; they are for one process.
  if (!absl::SimpleAtoi(pid, &process) || process != ::getpid()) {
    return std::vector<ActivatedSocket>();
  }
  int count = 0;
  if (!absl::SimpleAtoi(count_text, &count) || count < 0 || count > kFdsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the service manager's ", kCount, "=", count_text,
                     " is no number of file descriptors from 0 to ", kFdsMax));
  }
  std::vector<std::string> names = absl::StrSplit(names_text, ':');
  if (names_text.empty()) names.assign(static_cast<size_t>(count), "unknown");
  if (names.size() != static_cast<size_t>(count)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the service manager's ", kNames, "=", names_text, " names ",
        names.size(), " of ", count, " file descriptors"));
  }
  std::vector<ActivatedSocket> sockets;
  for (int i = 0; i < count; ++i) {
    ActivatedSocket socket{kFirstFd + i,
                           std::move(names[static_cast<size_t>(i)])};
    if (::fcntl(socket.fd, F_SETFD, FD_CLOEXEC) != 0) {
      return Refuse(socket, absl::StrCat("which is not open: ",
                                         OsError(errno, "fcntl").message()));
    }
    sockets.push_back(std::move(socket));
  }
  return sockets;
}

absl::StatusOr<std::map<std::string, std::unique_ptr<Listener>>>
AdoptActivatedSockets(const v1::DaemonConfig& config,
                      const std::vector<ActivatedSocket>& sockets) {
  std::map<std::string, std::unique_ptr<Listener>> listeners;
  std::vector<UniqueFd> fds;
  fds.reserve(sockets.size());
  for (const ActivatedSocket& socket : sockets) fds.emplace_back(socket.fd);
  for (size_t i = 0; i < sockets.size(); ++i) {
    const ActivatedSocket& socket = sockets[i];
    OPTSTATE_RETURN_IF_ERROR(CheckListens(socket));
    OPTSTATE_ASSIGN_OR_RETURN(const std::string bound, BoundTo(socket));
    OPTSTATE_RETURN_IF_ERROR(CheckAddress(socket, bound, config));
    if (listeners.contains(bound)) {
      return Refuse(socket, absl::StrCat("and another one for ", bound,
                                         ": one is enough"));
    }
    OPTSTATE_ASSIGN_OR_RETURN(listeners[bound],
                              Adopt(socket, bound, config, std::move(fds[i])));
    spdlog::info("{}: opened by the service manager", bound);
  }
  return listeners;
}

}  // namespace optstate::accept
