#include "server/transport/grpc/message_patience.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

namespace optstate::transport {

Arrived ArrivedOn(int socket) {
  Arrived arrived;
  tcp_info info = {};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0) {
    arrived.received_bytes = info.tcpi_bytes_received;
  }
  int unread = 0;
  if (::ioctl(socket, FIONREAD, &unread) == 0 && unread > 0) {
    arrived.unread_bytes = static_cast<uint64_t>(unread);
  }
  return arrived;
}

void MessagePatience::Begin(absl::Time now, const Arrived& arrived) {
  begin_ = now;
  received_bytes_ = arrived.received_bytes;
}

bool MessagePatience::Lasts(absl::Time now, const Arrived& arrived) {
  const bool has_come = arrived.received_bytes - received_bytes_ >= kBytesMin ||
                        arrived.unread_bytes >= kBytesMin;
  received_bytes_ = arrived.received_bytes;
  return has_come && now - begin_ < most_;
}

}  // namespace optstate::transport
