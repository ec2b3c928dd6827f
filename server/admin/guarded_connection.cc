#include "server/admin/guarded_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "proto/types/status_macros.h"

namespace optstate::admin {
namespace {

// Limit of bytes buffered in one direction; more wait in the socket.
constexpr size_t kBytesMax = 64 << 10;
// Limit of reads in one wake-up. They take more than a socket holds, so that
// all of it is passed on when gRPC has closed.
constexpr int kReadsMax = 16;
// Time for a peer to take gRPC's last bytes.
constexpr absl::Duration kEndTimeout = absl::Seconds(5);
constexpr double kBytesPerUnit = 1024;

}  // namespace

GuardedConnection::GuardedConnection(os::EventLoop* loop, UniqueFd peer,
                                     UniqueFd grpc, Callbacks callbacks)
    : loop_(loop),
      peer_(std::move(peer)),
      grpc_(std::move(grpc)),
      callbacks_(std::move(callbacks)) {}

GuardedConnection::~GuardedConnection() {
  loop_->Unwatch(peer_.get());
  if (!grpc_closed_) loop_->Unwatch(grpc_.get());
  if (waits_) loop_->Cancel(wait_timer_);
  if (grpc_closed_) loop_->Cancel(end_timer_);
}

absl::Status GuardedConnection::Start() {
  OPTSTATE_RETURN_IF_ERROR(
      loop_->Watch(peer_.get(), EPOLLIN, [this](uint32_t events) {
        // A peer that has closed takes no answer any more.
        if ((events & (EPOLLHUP | EPOLLERR)) != 0) return End();
        Pump();
      }));
  return loop_->Watch(grpc_.get(), EPOLLIN, [this](uint32_t events) {
    if ((events & (EPOLLHUP | EPOLLERR)) != 0) OnGrpcClosed();
    Pump();
  });
}

// Handles gRPC's end of the connection: a socket closed at its other end would
// wake the loop for ever.
void GuardedConnection::OnGrpcClosed() {
  grpc_closed_ = true;
  loop_->Unwatch(grpc_.get());
  end_timer_ = loop_->RunAfter(kEndTimeout, [this] { End(); });
}

void GuardedConnection::End() {
  const auto on_end = callbacks_.on_end;
  on_end();
}

void GuardedConnection::Pump() {
  if (!PumpToGrpc() || !PumpToPeer()) return End();
  UpdateEvents();
}

bool GuardedConnection::PumpToGrpc() {
  if (grpc_closed_ || waits_) return true;
  // The write error is ignored: gRPC's close is handled elsewhere, and gRPC's
  // bytes go to the peer first.
  (void)Write(grpc_.get(), &to_grpc_.bytes);
  if (!to_grpc_.bytes.empty()) return true;
  switch (Read(peer_.get(), &to_grpc_)) {
    case Outcome::kNothing:
      return true;
    case Outcome::kOver:
      return false;
    case Outcome::kBytes:
      break;
  }
  Charge();
  (void)Write(grpc_.get(), &to_grpc_.bytes);
  return true;
}

bool GuardedConnection::PumpToPeer() {
  for (int i = 0; i < kReadsMax; ++i) {
    if (!Write(peer_.get(), &to_peer_.bytes)) return false;
    if (!to_peer_.bytes.empty()) return true;
    const Outcome outcome = Read(grpc_.get(), &to_peer_);
    if (outcome != Outcome::kBytes) return outcome == Outcome::kNothing;
  }
  return true;
}

GuardedConnection::Outcome GuardedConnection::Read(int from, Flow* flow) {
  char buffer[kBytesMax];
  const ssize_t count = ::recv(from, buffer, sizeof(buffer), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
    return Outcome::kNothing;
  }
  // HTTP/2 knows no half-closed connection.
  if (count <= 0) return Outcome::kOver;
  const absl::string_view bytes(buffer, static_cast<size_t>(count));
  const absl::Status status = flow->frames.Take(bytes);
  if (!status.ok()) {
    Refuse(status);
    return Outcome::kOver;
  }
  flow->bytes.assign(bytes.data(), bytes.size());
  return Outcome::kBytes;
}

// Writes bytes; false when the connection is gone.
bool GuardedConnection::Write(int to, std::string* bytes) {
  while (!bytes->empty()) {
    const ssize_t count =
        ::send(to, bytes->data(), bytes->size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN;
    bytes->erase(0, static_cast<size_t>(count));
  }
  return true;
}

void GuardedConnection::Charge() {
  const uint64_t frames = to_grpc_.frames.frame_count();
  const double units =
      static_cast<double>(frames - frames_charged_) +
      static_cast<double>(to_grpc_.bytes.size()) / kBytesPerUnit;
  frames_charged_ = frames;
  const absl::Duration wait = callbacks_.charge(units);
  if (wait <= absl::ZeroDuration()) return;
  waits_ = true;
  wait_timer_ = loop_->RunAfter(wait, [this] {
    waits_ = false;
    Pump();
  });
}

// Sends GOAWAY, if gRPC has sent whole frames; the peer may be in the middle of
// its own.
void GuardedConnection::Refuse(const absl::Status& why) {
  if (!to_peer_.bytes.empty() || !to_peer_.frames.at_boundary()) return;
  const std::string last = GoAwayFrame(
      to_grpc_.frames.opened_stream(),
      absl::StatusCodeToString(why.code()) + ": " + std::string(why.message()));
  (void)::send(peer_.get(), last.data(), last.size(),
               MSG_DONTWAIT | MSG_NOSIGNAL);
  (void)::shutdown(peer_.get(), SHUT_WR);
  // Unread bytes would make the kernel discard the bytes just sent.
  char ignored[4096];
  for (size_t i = 0; i < kBytesMax / sizeof(ignored); ++i) {
    if (::recv(peer_.get(), ignored, sizeof(ignored), MSG_DONTWAIT) <= 0)
      return;
  }
}

void GuardedConnection::UpdateEvents() {
  uint32_t peer = to_peer_.bytes.empty() ? 0u : uint32_t{EPOLLOUT};
  if (to_grpc_.bytes.empty() && !waits_ && !grpc_closed_) peer |= EPOLLIN;
  // Mostly nothing changes, and a call of the system is a good part of what
  // passing a few bytes on costs.
  if (peer != peer_events_) loop_->SetEvents(peer_.get(), peer);
  peer_events_ = peer;
  if (grpc_closed_) return;
  uint32_t grpc = to_grpc_.bytes.empty() ? 0u : uint32_t{EPOLLOUT};
  if (to_peer_.bytes.empty()) grpc |= EPOLLIN;
  if (grpc != grpc_events_) loop_->SetEvents(grpc_.get(), grpc);
  grpc_events_ = grpc;
}

}  // namespace optstate::admin
