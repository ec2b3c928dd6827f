#include "server/accept/tls/tls_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::accept {
namespace {

// A TLS connection starts with a record of this type.
constexpr char kTlsRecord = 0x16;
// Time for a peer to take the last bytes.
constexpr absl::Duration kEndTimeout = absl::Seconds(5);
constexpr int kDrainReads = 32;

// Unread bytes would make the kernel discard those just sent.
void Drain(int socket) {
  char ignored[4096];
  for (int i = 0; i < kDrainReads; ++i) {
    if (::recv(socket, ignored, sizeof(ignored), MSG_DONTWAIT) <= 0) return;
  }
}

}  // namespace

TlsConnection::TlsConnection(os::EventLoop* loop, UniqueFd network,
                             std::unique_ptr<tls::TlsStream> stream,
                             absl::Duration timeout, Callbacks callbacks)
    : loop_(loop),
      timeout_(timeout),
      callbacks_(std::move(callbacks)),
      network_(std::move(network)),
      stream_(std::move(stream)) {}

TlsConnection::~TlsConnection() {
  if (watches_network_) {
    loop_->Unwatch(relay_ != nullptr ? relay_->network() : network_.get());
  }
  if (watches_inside_) loop_->Unwatch(relay_->inside());
  if (has_timer_) loop_->Cancel(timer_);
}

absl::Status TlsConnection::Start() {
  OPTSTATE_RETURN_IF_ERROR(loop_->Watch(
      network_.get(), EPOLLIN, [this](uint32_t events) { OnNetwork(events); }));
  watches_network_ = true;
  has_timer_ = true;
  timer_ = loop_->RunAfter(timeout_, [this] {
    has_timer_ = false;
    Refuse(absl::DeadlineExceededError("the TLS handshake took too long"));
  });
  return absl::OkStatus();
}

void TlsConnection::OnNetwork(uint32_t events) {
  if (relay_ != nullptr) return OnRelay(events, 0);
  if (Receive()) ShakeHands();
}

bool TlsConnection::Receive() {
  char buffer[16 << 10];
  const ssize_t count =
      ::recv(network_.get(), buffer, sizeof(buffer),
             has_begun_ ? MSG_DONTWAIT : MSG_DONTWAIT | MSG_PEEK);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (count < 0) {
    End(OsError(errno, "recv"));
    return false;
  }
  if (count == 0) {
    // One that has said nothing has only looked whether the port is open.
    End(has_begun_ ? absl::UnavailableError("closed by peer")
                   : absl::OkStatus());
    return false;
  }
  if (has_begun_) {
    stream_->TakeEncrypted({buffer, static_cast<size_t>(count)});
    return true;
  }
  if (buffer[0] == kTlsRecord) {
    has_begun_ = true;
    return Receive();
  }
  loop_->Unwatch(network_.get());
  watches_network_ = false;
  callbacks_.on_plaintext(std::move(network_));
  End(absl::OkStatus());
  return false;
}

void TlsConnection::ShakeHands() {
  const absl::Status status = stream_->Handshake();
  if (!status.ok()) return Refuse(status);
  if (stream_->is_ready()) return BeginRelay();
  std::string& output = stream_->output();
  const ssize_t count = ::send(network_.get(), output.data(), output.size(),
                               MSG_DONTWAIT | MSG_NOSIGNAL);
  if (count < 0 && errno != EAGAIN && errno != EINTR) {
    return End(OsError(errno, "send"));
  }
  if (count > 0) output.erase(0, static_cast<size_t>(count));
  loop_->SetEvents(network_.get(),
                   output.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

void TlsConnection::BeginRelay() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
                   ends) != 0) {
    return End(OsError(errno, "socketpair for a TLS connection"));
  }
  UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  const absl::Status watched = loop_->Watch(
      ours.get(), EPOLLIN, [this](uint32_t events) { OnRelay(0, events); });
  if (!watched.ok()) return End(watched);
  watches_inside_ = true;
  loop_->Cancel(timer_);
  has_timer_ = false;
  const std::vector<std::string> names = stream_->peer_names();
  relay_ = std::make_unique<tls::TlsRelay>(std::move(network_), std::move(ours),
                                           std::move(stream_));
  callbacks_.on_ready(std::move(theirs), names);
  Pump();
}

void TlsConnection::Pump() {
  if (relay_ != nullptr) OnRelay(0, 0);
}

void TlsConnection::OnRelay(uint32_t network, uint32_t inside) {
  if (!relay_->OnEvents(network, inside)) return End(relay_->status());
  UpdateEvents();
}

void TlsConnection::UpdateEvents() {
  if (watches_network_ && !relay_->watches_network()) {
    loop_->Unwatch(relay_->network());
    watches_network_ = false;
  }
  if (watches_inside_ && !relay_->watches_inside()) {
    loop_->Unwatch(relay_->inside());
    watches_inside_ = false;
  }
  if (watches_network_) {
    loop_->SetEvents(relay_->network(), relay_->network_events());
  }
  if (watches_inside_) {
    loop_->SetEvents(relay_->inside(), relay_->inside_events());
  }
  if (relay_->is_ending() && !has_timer_) {
    has_timer_ = true;
    timer_ = loop_->RunAfter(kEndTimeout, [this] {
      has_timer_ = false;
      End(absl::OkStatus());
    });
  }
}

// Sends the alert that says why, as far as the peer takes it.
void TlsConnection::Refuse(const absl::Status& why) {
  const std::string& alert = stream_->output();
  (void)::send(network_.get(), alert.data(), alert.size(),
               MSG_DONTWAIT | MSG_NOSIGNAL);
  (void)::shutdown(network_.get(), SHUT_WR);
  Drain(network_.get());
  End(why);
}

void TlsConnection::End(const absl::Status& why) {
  const auto on_end = callbacks_.on_end;
  on_end(why);
}

}  // namespace optstate::accept
