#include "server/admin/grpc_refusals.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
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

void GrpcRefusals::Refuse(UniqueFd connection, absl::Status why) {
  if (refusals_.size() >= kRefusalsMax) return;
  const int fd = connection.get();
  // Many clients send their first call only when they have seen these.
  if (!Say(fd, SettingsFrame() + SettingsAckFrame())) return;
  const absl::Status watched =
      loop_->Watch(fd, EPOLLIN, [this, fd](uint32_t) { OnReadable(fd); });
  if (!watched.ok()) return;
  Refusal& refusal = refusals_[fd];
  refusal.fd = std::move(connection);
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
