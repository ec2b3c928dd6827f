#include "proto/shm/frame.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::shm {
namespace {

constexpr size_t kHeaderBytes = 8;
// Memory is allocated for received data plus this much, not for the size that a
// header announces.
constexpr size_t kReceiveBytesMax = 1 << 20;

// Room for the fds of one message, aligned as the kernel wants it.
union ControlBuffer {
  char bytes[CMSG_SPACE(kFrameFdsMax * sizeof(int))];
  cmsghdr align;
};

void StoreLittleEndian(uint32_t value, char* bytes) {
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
}

uint32_t LoadLittleEndian(const char* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    value |= uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return value;
}

// Milliseconds for poll(), rounded up so that it does not wake too early.
int PollTimeoutMs(absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) return -1;
  const absl::Duration left = deadline - absl::Now();
  if (left <= absl::ZeroDuration()) return 0;
  const int64_t ms =
      absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1)));
  return static_cast<int>(std::min<int64_t>(ms, INT_MAX));
}

// Returns once the socket may be ready; an error or hang-up counts as ready,
// because the call that follows reports which.
absl::Status AwaitReady(int socket, short events, absl::Time deadline) {
  // The deadline is checked before poll(), so that a peer that trickles bytes
  // cannot defer it.
  while (absl::Now() < deadline) {
    pollfd entry = {.fd = socket, .events = events, .revents = 0};
    const int count = poll(&entry, 1, PollTimeoutMs(deadline));
    if (count > 0) return absl::OkStatus();
    if (count < 0 && errno != EINTR) return OsError(errno, "poll");
  }
  return absl::DeadlineExceededError(
      events == POLLIN ? "the peer sent no whole frame in time"
                       : "the peer does not read");
}

bool WouldBlock(int error_number) {
  return error_number == EAGAIN || error_number == EWOULDBLOCK;
}

// Checks that the socket can carry fds: others drop them silently.
absl::Status CheckUnix(int socket) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0) {
    return OsError(errno, "getsockopt(SO_DOMAIN)");
  }
  if (domain == AF_UNIX) return absl::OkStatus();
  return absl::InvalidArgumentError("fds travel over unix sockets only");
}

void AttachFds(absl::Span<const int> fds, ControlBuffer* control,
               msghdr* message) {
  message->msg_control = control->bytes;
  message->msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* header = CMSG_FIRSTHDR(message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
}

// Takes ownership of all fds of a message, so that they are closed even when
// the frame is refused.
void TakeFds(msghdr* message, std::vector<UniqueFd>* fds) {
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr;
       header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds->emplace_back(fd);
    }
  }
}

// Receives exactly `bytes` bytes. `fds`: the destination of the fds that travel
// with them; null where there must be none.
absl::Status ReceiveAll(int socket, char* data, size_t bytes,
                        std::vector<UniqueFd>* fds, absl::Time deadline) {
  size_t received = 0;
  while (received < bytes) {
    ControlBuffer control = {};
    iovec io = {.iov_base = data + received, .iov_len = bytes - received};
    msghdr message = {};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    if (fds != nullptr) {
      message.msg_control = control.bytes;
      message.msg_controllen = sizeof(control.bytes);
    }
    const ssize_t count =
        recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (!WouldBlock(errno)) return OsError(errno, "recvmsg");
      OPTSTATE_RETURN_IF_ERROR(AwaitReady(socket, POLLIN, deadline));
      continue;
    }
    if (fds != nullptr) TakeFds(&message, fds);
    if ((message.msg_flags & MSG_CTRUNC) != 0 ||
        (fds != nullptr && fds->size() > kFrameFdsMax)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "more fds than a frame may carry: ",
          fds == nullptr ? 0 : kFrameFdsMax,
          fds == nullptr ? " beside its payload" : " with its header"));
    }
    if (count == 0) {
      return absl::UnavailableError(
          received == 0 ? "closed by peer" : "closed by peer within a frame");
    }
    received += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> ParseHeader(const char* header,
                                     uint32_t payload_bytes_max) {
  if (std::memcmp(header, kFrameMagic, sizeof(kFrameMagic)) != 0) {
    return absl::InvalidArgumentError(
        "not an optstate frame: it does not start with \"OPST\"");
  }
  const uint32_t payload_bytes = LoadLittleEndian(header + sizeof(kFrameMagic));
  if (payload_bytes > payload_bytes_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame of ", payload_bytes, " bytes; at most ",
                     payload_bytes_max, " are taken here"));
  }
  return payload_bytes;
}

absl::StatusOr<std::string> ReceivePayload(int socket, size_t bytes,
                                           absl::Time deadline) {
  std::string payload;
  while (payload.size() < bytes) {
    const size_t begin = payload.size();
    const size_t count = std::min(bytes - begin, kReceiveBytesMax);
    payload.resize(begin + count);
    const absl::Status status =
        ReceiveAll(socket, payload.data() + begin, count, nullptr, deadline);
    if (absl::IsUnavailable(status)) {
      return absl::UnavailableError("closed by peer within a frame");
    }
    OPTSTATE_RETURN_IF_ERROR(status);
  }
  return payload;
}

}  // namespace

absl::Status SendFrame(int socket, absl::string_view payload,
                       absl::Span<const int> fds, absl::Time deadline) {
  if (payload.size() > kFrameBytesMax || fds.size() > kFrameFdsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame of ", payload.size(), " bytes and ", fds.size(),
                     " fds; at most ", kFrameBytesMax, " and ", kFrameFdsMax));
  }
  if (!fds.empty()) OPTSTATE_RETURN_IF_ERROR(CheckUnix(socket));
  char header[kHeaderBytes];
  std::memcpy(header, kFrameMagic, sizeof(kFrameMagic));
  StoreLittleEndian(static_cast<uint32_t>(payload.size()),
                    header + sizeof(kFrameMagic));
  const size_t total = kHeaderBytes + payload.size();
  size_t sent = 0;
  while (sent < total) {
    // The buffers hold the rest of the header and of the payload.
    const size_t header_sent = std::min(sent, kHeaderBytes);
    const size_t payload_sent = sent - header_sent;
    iovec io[2] = {
        {.iov_base = header + header_sent,
         .iov_len = kHeaderBytes - header_sent},
        {.iov_base = const_cast<char*>(payload.data()) + payload_sent,
         .iov_len = payload.size() - payload_sent}};
    msghdr message = {};
    message.msg_iov = io;
    message.msg_iovlen = 2;
    ControlBuffer control = {};
    if (sent == 0 && !fds.empty()) AttachFds(fds, &control, &message);
    const ssize_t count =
        sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
      continue;
    }
    if (errno == EINTR) continue;
    if (!WouldBlock(errno)) return OsError(errno, "sendmsg");
    OPTSTATE_RETURN_IF_ERROR(AwaitReady(socket, POLLOUT, deadline));
  }
  return absl::OkStatus();
}

absl::StatusOr<Frame> ReceiveFrame(int socket, uint32_t payload_bytes_max,
                                   absl::Time deadline) {
  Frame frame;
  char header[kHeaderBytes];
  OPTSTATE_RETURN_IF_ERROR(
      ReceiveAll(socket, header, kHeaderBytes, &frame.fds, deadline));
  OPTSTATE_ASSIGN_OR_RETURN(
      const uint32_t payload_bytes,
      ParseHeader(header, std::min(payload_bytes_max, kFrameBytesMax)));
  OPTSTATE_ASSIGN_OR_RETURN(frame.payload,
                            ReceivePayload(socket, payload_bytes, deadline));
  return frame;
}

}  // namespace optstate::shm
