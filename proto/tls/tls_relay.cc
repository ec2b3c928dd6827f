#include "proto/tls/tls_relay.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "proto/types/os_error.h"

namespace optstate::tls {
namespace {

// The payload of one TLS record, and the unit of a read.
constexpr size_t kUnitBytes = 16 << 10;
// Limit of units in each direction and call, so that other connections get
// their turn.
constexpr int kUnitsMax = 16;

// Sends from the front of `bytes`; false: the socket is gone.
bool Send(int socket, std::string* bytes) {
  size_t sent = 0;
  bool open = true;
  while (sent < bytes->size()) {
    const ssize_t count =
        ::send(socket, bytes->data() + sent, bytes->size() - sent,
               MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      open = errno == EAGAIN;
      break;
    }
    sent += static_cast<size_t>(count);
  }
  bytes->erase(0, sent);
  return open;
}

}  // namespace

TlsRelay::Flow TlsRelay::Fail(absl::Status status) {
  status_ = std::move(status);
  return Flow::kFailed;
}

bool TlsRelay::SendToNetwork() {
  return Send(network_.get(), &stream_->output());
}

bool TlsRelay::SendToInside() {
  if (inside_is_gone_) plain_.clear();
  return Send(inside_.get(), &plain_);
}

TlsRelay::Flow TlsRelay::TakeFromNetwork() {
  char buffer[kUnitBytes];
  const ssize_t count =
      ::recv(network_.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return Flow::kBlocked;
  if (count < 0) return Fail(OsError(errno, "recv from the network"));
  if (count == 0) {
    network_is_over_ = true;
  } else {
    stream_->TakeEncrypted({buffer, static_cast<size_t>(count)});
  }
  return Flow::kMoved;
}

TlsRelay::Flow TlsRelay::MoveInward() {
  if (inside_was_shut_) return Flow::kBlocked;
  // Nothing is taken from the network before all taken earlier has gone in.
  if (!SendToInside()) inside_is_gone_ = true;
  if (!plain_.empty()) return Flow::kBlocked;
  absl::Status decrypted = stream_->Decrypt(kUnitBytes, &plain_);
  if (decrypted.ok() && plain_.empty() && !stream_->is_closed_by_peer()) {
    // A peer that makes TLS answer, and takes no answers, has to wait.
    if (stream_->output().size() > kBytesMax) return Flow::kBlocked;
    const Flow taken = TakeFromNetwork();
    if (taken != Flow::kMoved) return taken;
    decrypted = stream_->Decrypt(kUnitBytes, &plain_);
  }
  if (!decrypted.ok()) return Fail(std::move(decrypted));
  if (!plain_.empty()) return Flow::kMoved;
  network_is_over_ |= stream_->is_closed_by_peer();
  if (!network_is_over_) return Flow::kMoved;
  (void)::shutdown(inside_.get(), SHUT_WR);
  inside_was_shut_ = true;
  return Flow::kBlocked;
}

TlsRelay::Flow TlsRelay::TakeFromInside() {
  char buffer[kUnitBytes];
  const ssize_t count =
      ::recv(inside_.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return Flow::kBlocked;
  if (count < 0 && errno != ECONNRESET) {
    return Fail(OsError(errno, "recv from the socket pair"));
  }
  if (count <= 0) {
    inside_is_over_ = true;
    stream_->Close();
    return Flow::kMoved;
  }
  absl::Status encrypted =
      stream_->Encrypt({buffer, static_cast<size_t>(count)});
  return encrypted.ok() ? Flow::kMoved : Fail(std::move(encrypted));
}

TlsRelay::Flow TlsRelay::MoveOutward() {
  if (!SendToNetwork()) {
    return Fail(absl::UnavailableError("the network connection was lost"));
  }
  if (!stream_->output().empty()) return Flow::kBlocked;
  if (!inside_is_over_) return TakeFromInside();
  ShutNetwork();
  return Flow::kBlocked;
}

void TlsRelay::ShutNetwork() {
  if (network_was_shut_) return;
  (void)::shutdown(network_.get(), SHUT_WR);
  network_was_shut_ = true;
}

bool TlsRelay::OnEvents(uint32_t network, uint32_t inside) {
  if ((inside & (EPOLLHUP | EPOLLERR)) != 0) inside_is_gone_ = true;
  if ((network & EPOLLHUP) != 0) network_is_gone_ = true;
  if ((network & EPOLLERR) != 0 && network_is_over_) {
    status_ = absl::UnavailableError("the network connection was reset");
    return false;
  }
  bool inward = true;
  bool outward = true;
  for (int i = 0; i < kUnitsMax && (inward || outward); ++i) {
    if (inward) inward = MoveInward() == Flow::kMoved;
    if (outward && status_.ok()) outward = MoveOutward() == Flow::kMoved;
    if (status_.ok()) continue;
    // The alert, as far as the socket takes it.
    (void)SendToNetwork();
    return false;
  }
  if (inside_is_over_ && stream_->output().empty()) ShutNetwork();
  return !(network_was_shut_ && inside_was_shut_);
}

uint32_t TlsRelay::network_events() const {
  uint32_t events = 0;
  if (!stream_->output().empty()) events |= EPOLLOUT;
  const bool takes = plain_.empty() && !network_is_over_ &&
                     stream_->output().size() <= kBytesMax;
  if (takes) events |= EPOLLIN;
  return events;
}

uint32_t TlsRelay::inside_events() const {
  uint32_t events = 0;
  if (!plain_.empty()) events |= EPOLLOUT;
  if (stream_->output().empty() && !inside_is_over_) events |= EPOLLIN;
  return events;
}

}  // namespace optstate::tls
