#include "server/engine/control_channel.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/shm/frame.h"
#include "proto/types/os_error.h"

namespace optstate {
namespace {

// A Hello and what the supervisor adds to it.
constexpr size_t kPacketBytesMax = shm::kHelloBytesMax + 4096;
// More than one, so that a wrong packet's fds can be closed.
constexpr int kFdsMax = 4;

union ControlBuffer {
  char bytes[CMSG_SPACE(kFdsMax * sizeof(int))];
  cmsghdr align;
};

std::vector<UniqueFd> TakeFds(msghdr* message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr;
       header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

ControlChannel::ControlChannel(UniqueFd socket) : socket_(std::move(socket)) {}

absl::StatusOr<AdoptedConnection> ControlChannel::Receive() {
  std::string packet(kPacketBytesMax, '\0');
  ControlBuffer control = {};
  iovec io = {.iov_base = packet.data(), .iov_len = packet.size()};
  msghdr message = {};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  ssize_t bytes;
  do {
    bytes = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) return OsError(errno, "recvmsg on the control socket");
  std::vector<UniqueFd> fds = TakeFds(&message);
  if (bytes == 0) return absl::UnavailableError("the supervisor closed");
  AdoptedConnection adopted;
  const bool whole = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
  if (!whole || fds.size() != 1 ||
      !adopted.message.ParseFromArray(packet.data(), static_cast<int>(bytes))) {
    return absl::InvalidArgumentError(
        absl::StrCat("control packet of ", bytes, " bytes with ", fds.size(),
                     " fds is no AdoptConnection"));
  }
  adopted.socket = std::move(fds[0]);
  return adopted;
}

absl::Status ControlChannel::SendReady() {
  v1::EngineEvent event;
  event.mutable_ready();
  return Send(event);
}

absl::Status ControlChannel::SendFinished() {
  v1::EngineEvent event;
  event.mutable_finished();
  return Send(event);
}

absl::Status ControlChannel::Send(const v1::EngineEvent& event) {
  const std::string packet = event.SerializeAsString();
  ssize_t bytes;
  do {
    bytes = ::send(socket_.get(), packet.data(), packet.size(), MSG_NOSIGNAL);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) return OsError(errno, "send on the control socket");
  return absl::OkStatus();
}

}  // namespace optstate
