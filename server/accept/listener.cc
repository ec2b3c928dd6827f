#include "server/accept/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/accept/socket_file.h"

namespace optstate::accept {
namespace {

constexpr int kBacklog = 1024;  // the kernel caps it at net.core.somaxconn
constexpr int kSocketFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

absl::StatusOr<std::string> BoundName(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return OsError(errno, "getsockname");
  }
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  const int error = ::getnameinfo(reinterpret_cast<sockaddr*>(&address), size,
                                  host, sizeof(host), port, sizeof(port),
                                  NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) return absl::InternalError(::gai_strerror(error));
  if (address.ss_family == AF_INET6) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<UniqueFd> BindTcp(const addrinfo& info,
                                 const std::string& name) {
  UniqueFd fd(::socket(info.ai_family, kSocketFlags, 0));
  if (!fd.ok()) return OsError(errno, absl::StrCat("socket for ", name));
  const int on = 1;
  // A restarted daemon must not wait for TIME_WAIT to pass.
  (void)::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(fd.get(), info.ai_addr, info.ai_addrlen) != 0) {
    return OsError(errno, absl::StrCat("bind ", name));
  }
  if (::listen(fd.get(), kBacklog) != 0) {
    return OsError(errno, absl::StrCat("listen on ", name));
  }
  return fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(
    const config::ListenAddress& address, mode_t mode) {
  if (address.unix_path.empty()) return OpenTcp(address);
  return OpenUnix(address.unix_path, mode, /*is_locked=*/false);
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::OpenUnix(
    const std::string& path, mode_t mode, bool is_locked) {
  OPTSTATE_RETURN_IF_ERROR(PrepareSocketFolder(path));
  std::unique_ptr<Listener> listener(new Listener());
  if (!is_locked) {
    OPTSTATE_ASSIGN_OR_RETURN(
        listener->lock_,
        os::FileLock::Take(path + ".lock", absl::StrCat("socket ", path)));
  }
  OPTSTATE_RETURN_IF_ERROR(RemoveDeadSocket(path));

  listener->fd_.reset(::socket(AF_UNIX, kSocketFlags, 0));
  if (!listener->fd_.ok()) return OsError(errno, "socket");
  const sockaddr_un address = UnixSocketAddress(path);
  if (::bind(listener->fd(), reinterpret_cast<const sockaddr*>(&address),
             sizeof(address)) != 0) {
    return OsError(errno, absl::StrCat("bind ", path));
  }
  // Permissions are set before listen(): until then no process can connect with
  // the wrong ones.
  if (::chmod(path.c_str(), mode) != 0) {
    return OsError(errno, absl::StrCat("chmod ", path));
  }
  OPTSTATE_RETURN_IF_ERROR(listener->NoteFile(path));
  if (::listen(listener->fd(), kBacklog) != 0) {
    return OsError(errno, absl::StrCat("listen on ", path));
  }
  return listener;
}

absl::Status Listener::NoteFile(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) {
    return OsError(errno, absl::StrCat("stat ", path));
  }
  path_ = path;
  name_ = "unix:" + path;
  device_ = info.st_dev;
  inode_ = info.st_ino;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Inherit(
    const config::ListenAddress& address, UniqueFd fd, UniqueFd lock,
    mode_t mode) {
  int listening = 0;
  socklen_t size = sizeof(listening);
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) !=
          0 ||
      listening == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the inherited fd ", fd.get(), " listens on nothing"));
  }
  std::unique_ptr<Listener> listener(new Listener());
  listener->fd_ = std::move(fd);
  if (address.unix_path.empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(listener->name_, BoundName(listener->fd()));
    return listener;
  }
  listener->owns_file_ = lock.ok();
  if (lock.ok()) {
    OPTSTATE_ASSIGN_OR_RETURN(
        listener->lock_,
        os::FileLock::Inherit(address.unix_path + ".lock", std::move(lock)));
  }
  OPTSTATE_RETURN_IF_ERROR(listener->NoteFile(address.unix_path));
  struct stat info;
  if (::stat(address.unix_path.c_str(), &info) == 0 &&
      (info.st_mode & 07777) == mode) {
    return listener;  // the file may be another user's
  }
  // The mode changes in one step: it is never wider than the old or the new
  // one.
  if (::chmod(address.unix_path.c_str(), mode) != 0) {
    return OsError(errno, absl::StrCat("chmod ", address.unix_path));
  }
  return listener;
}

void Listener::Retire(const config::ListenAddress& address, UniqueFd fd,
                      UniqueFd /*lock*/) {
  fd.reset();
  if (address.unix_path.empty()) return;
  const absl::Status removed = RemoveDeadSocket(address.unix_path);
  if (!removed.ok())
    spdlog::info("no longer listening: {}", removed.ToString());
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Reopened(
    mode_t mode) const {
  if (!is_unix() || FileIsInPlace()) return nullptr;
  return OpenUnix(
      path_, mode,
      /*is_locked=*/lock_.has_value() && lock_->IsAt(path_ + ".lock"));
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::OpenTcp(
    const config::ListenAddress& address) {
  const std::string name = absl::StrCat(address.host, ":", address.port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(
      address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("listen address ", name, ": ", ::gai_strerror(error)));
  }
  const absl::Cleanup free_found = [found] { ::freeaddrinfo(found); };
  std::unique_ptr<Listener> listener(new Listener());
  OPTSTATE_ASSIGN_OR_RETURN(listener->fd_, BindTcp(*found, name));
  OPTSTATE_ASSIGN_OR_RETURN(listener->name_, BoundName(listener->fd()));
  return listener;
}

// Returns whether the file is still this socket's: another one may have been
// put there by hand.
bool Listener::FileIsInPlace() const {
  struct stat info;
  return ::lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ &&
         info.st_ino == inode_;
}

Listener::~Listener() {
  if (is_unix() && owns_file_ && FileIsInPlace()) {
    (void)::unlink(path_.c_str());
  }
}

}  // namespace optstate::accept
