#include "server/engine/control_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::engine {
namespace {

constexpr int kSocketType = SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC;
// Supervisors connect one after another.
constexpr int kBacklog = 16;
// Room for more than one fd, so that the fds of a wrong packet can be closed.
constexpr int kFdsMax = 4;

union ControlBuffer {
  char bytes[CMSG_SPACE(kFdsMax * sizeof(int)) + CMSG_SPACE(sizeof(ucred))];
  cmsghdr align;
};

// A job's path can be longer than a socket's address may be: the directory is
// opened, and the socket is reached through its fd.
struct Place {
  UniqueFd directory;
  sockaddr_un address{};
};

absl::StatusOr<Place> PlaceOf(const std::string& job_directory) {
  Place place;
  place.directory.reset(
      ::open(job_directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!place.directory.ok()) {
    return OsError(errno, absl::StrCat("open ", job_directory));
  }
  const std::string path =
      absl::StrCat("/proc/self/fd/", place.directory.get(), "/", kSocketName);
  place.address.sun_family = AF_UNIX;
  std::memcpy(place.address.sun_path, path.c_str(), path.size() + 1);
  return place;
}

std::string PathIn(const std::string& job_directory) {
  return absl::StrCat(job_directory, "/", kSocketName);
}

// Takes the control data: the fds, and the sender's pid if the kernel gives it.
void TakeControl(msghdr* message, std::vector<UniqueFd>* fds, pid_t* sender) {
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr;
       header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET) continue;
    if (header->cmsg_type == SCM_CREDENTIALS) {
      ucred credentials{};
      std::memcpy(&credentials, CMSG_DATA(header), sizeof(credentials));
      *sender = credentials.pid;
    }
    if (header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds->emplace_back(fd);
    }
  }
}

}  // namespace

absl::StatusOr<UniqueFd> ListenForSupervisor(const std::string& job_directory) {
  OPTSTATE_ASSIGN_OR_RETURN(const Place place, PlaceOf(job_directory));
  UniqueFd listener(::socket(AF_UNIX, kSocketType, 0));
  if (!listener.ok()) return OsError(errno, "socket");
  if (::unlinkat(place.directory.get(), kSocketName, 0) != 0 &&
      errno != ENOENT) {
    return OsError(errno, absl::StrCat("unlink ", PathIn(job_directory)));
  }
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&place.address),
             sizeof(place.address)) != 0) {
    return OsError(errno, absl::StrCat("bind ", PathIn(job_directory)));
  }
  if (::listen(listener.get(), kBacklog) != 0) {
    return OsError(errno, absl::StrCat("listen on ", PathIn(job_directory)));
  }
  return listener;
}

absl::Status TakeListenerOver(int listener) {
  if (::listen(listener, kBacklog) == 0) return absl::OkStatus();
  return OsError(errno, "listen on the engine's socket");
}

absl::StatusOr<UniqueFd> ConnectToEngine(const std::string& job_directory) {
  OPTSTATE_ASSIGN_OR_RETURN(const Place place, PlaceOf(job_directory));
  UniqueFd connection(::socket(AF_UNIX, kSocketType, 0));
  if (!connection.ok()) return OsError(errno, "socket");
  if (::connect(connection.get(),
                reinterpret_cast<const sockaddr*>(&place.address),
                sizeof(place.address)) != 0) {
    if (errno == ENOENT || errno == ECONNREFUSED) {
      return absl::UnavailableError(
          absl::StrCat("no engine answers at ", PathIn(job_directory)));
    }
    return OsError(errno, absl::StrCat("connect to ", PathIn(job_directory)));
  }
  const int on = 1;
  if (::setsockopt(connection.get(), SOL_SOCKET, SO_PASSCRED, &on,
                   sizeof(on)) != 0) {
    return OsError(errno, "setsockopt SO_PASSCRED");
  }
  return connection;
}

absl::StatusOr<UniqueFd> AcceptSupervisor(int listener) {
  UniqueFd connection(
      ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!connection.ok()) {
    if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) {
      return absl::UnavailableError("no supervisor connects just now");
    }
    return OsError(errno, "accept on the engine's socket");
  }
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) !=
      0) {
    return OsError(errno, "getsockopt SO_PEERCRED");
  }
  if (peer.uid != ::geteuid() && peer.uid != 0) {
    return absl::PermissionDeniedError(absl::StrCat("uid ", peer.uid,
                                                    " is no supervisor of uid ",
                                                    ::geteuid(), "'s engine"));
  }
  return connection;
}

pid_t PeerPid(int connection) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return 0;
  }
  return peer.pid;
}

int SendPacket(int connection, absl::string_view bytes, int fd) {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  while (::sendmsg(connection, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

absl::StatusOr<std::optional<Packet>> ReceivePacket(int connection) {
  Packet packet;
  packet.bytes.resize(kPacketBytesMax);
  ControlBuffer control = {};
  iovec data{packet.bytes.data(), packet.bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  ssize_t bytes;
  do {
    bytes = ::recvmsg(connection, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) {
    if (errno == EAGAIN) return std::nullopt;
    if (errno == ECONNRESET) return absl::UnavailableError("the peer is gone");
    return OsError(errno, "recvmsg on a control connection");
  }
  std::vector<UniqueFd> fds;
  TakeControl(&message, &fds, &packet.sender);
  if (bytes == 0) return absl::UnavailableError("the peer has closed");
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || fds.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a control packet of ", bytes, " bytes with ", fds.size(),
                     " fds was cut off, is too large, or brings more than one "
                     "fd; out of file descriptors?"));
  }
  packet.bytes.resize(static_cast<size_t>(bytes));
  if (!fds.empty()) packet.fd = std::move(fds[0]);
  return packet;
}

}  // namespace optstate::engine
