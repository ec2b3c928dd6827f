#include "server/admin/grpc_refusals.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <string>
#include <utility>

namespace optstate::admin {
namespace {

// Time for the peer to make its call, and to close after the answer.
constexpr absl::Duration kTimeout = absl::Seconds(5);
// Limit of the bytes read from the peer meanwhile.
constexpr size_t kBytesMax = 256 << 10;

// Writes a few bytes into an empty socket buffer; bytes that do not fit are
// dropped.
bool Say(int fd, const std::string& bytes) {
  return ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace

GrpcRefusals::~GrpcRefusals() {
  for (auto& [fd, refusal] : refusals_) {
    loop_->Unwatch(fd);
    loop_->Cancel(refusal.timer);
  }
}

GrpcRefusals::Peer GrpcRefusals::PeerOf(int fd) {
  int family = 0;
  socklen_t size = sizeof(family);
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) != 0 ||
      family != AF_UNIX) {
    return kOverTcp;
  }
  ucred credentials{};
  size = sizeof(credentials);
  const bool is_known =
      ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0;
  return is_known ? Peer{credentials.uid} : kOverTcp;
}

bool GrpcRefusals::MakeRoomFor(Peer peer) {
  std::map<Peer, size_t> counts;
  for (const auto& [fd, refusal] : refusals_) ++counts[refusal.peer];
  const auto most = std::max_element(
      counts.begin(), counts.end(),
      [](const auto& a, const auto& b) { return a.second < b.second; });
  // With one more for this peer and one less for that one they are equal.
  if (most == counts.end() || most->second <= counts[peer] + 1) return false;
  int oldest = -1;
  for (const auto& [fd, refusal] : refusals_) {
    if (refusal.peer != most->first) continue;
    if (oldest == -1 || refusal.number < refusals_.at(oldest).number) {
      oldest = fd;
    }
  }
  End(oldest);
  return true;
}

void GrpcRefusals::Refuse(UniqueFd connection, absl::Status why) {
  const Peer peer = PeerOf(connection.get());
  if (refusals_.size() >= kRefusalsMax && !MakeRoomFor(peer)) return;
  const int fd = connection.get();
  // Many clients send their first call only when they have seen these.
  if (!Say(fd, SettingsFrame() + SettingsAckFrame())) return;
  const absl::Status watched =
      loop_->Watch(fd, EPOLLIN, [this, fd](uint32_t) { OnReadable(fd); });
  if (!watched.ok()) return;
  Refusal& refusal = refusals_[fd];
  refusal.fd = std::move(connection);
  refusal.peer = peer;
  refusal.number = next_number_++;
  refusal.why = std::move(why);
  refusal.timer = loop_->RunAfter(kTimeout, [this, fd] { End(fd); });
}

void GrpcRefusals::OnReadable(int fd) {
  const auto found = refusals_.find(fd);
  if (found != refusals_.end() && !Serve(&found->second)) End(fd);
}

bool GrpcRefusals::Serve(Refusal* refusal) {
  char buffer[16 << 10];
  const ssize_t count =
      ::recv(refusal->fd.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  if (count == 0) return false;
  refusal->bytes_read += static_cast<size_t>(count);
  if (refusal->bytes_read > kBytesMax) return false;
  if (refusal->said) return true;
  const absl::string_view bytes(buffer, static_cast<size_t>(count));
  if (!refusal->frames.Take(bytes).ok()) return false;
  const uint32_t stream = refusal->frames.opened_stream();
  if (stream == 0) return true;
  refusal->said = true;
  const bool sent =
      Say(refusal->fd.get(),
          TrailersOnlyFrame(stream, refusal->why) +
              GoAwayFrame(stream, std::string(refusal->why.message())));
  // Further bytes of the peer are read, because unread bytes would make the
  // kernel discard the answer; then the peer closes, or the time is over.
  (void)::shutdown(refusal->fd.get(), SHUT_WR);
  return sent;
}

void GrpcRefusals::End(int fd) {
  const auto node = refusals_.extract(fd);
  loop_->Unwatch(fd);
  loop_->Cancel(node.mapped().timer);
}

}  // namespace optstate::admin
