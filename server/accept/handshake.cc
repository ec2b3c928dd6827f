#include "server/accept/handshake.h"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/frame.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/accept/refusal.h"
#include "server/observe/peer_log.h"

namespace optstate::accept {
namespace {

constexpr size_t kMagicBytes = sizeof(shm::kFrameMagic);
constexpr size_t kHeaderBytes = kMagicBytes + sizeof(uint32_t);
// HTTP/2's preface starts "PRI * HTTP/2.0".
constexpr char kHttp2Magic[kMagicBytes] = {'P', 'R', 'I', ' '};
// A TLS connection starts with a record of this type.
constexpr char kTlsRecord = 0x16;

uint32_t PayloadBytes(const std::string& header) {
  uint32_t size = 0;
  for (size_t i = kHeaderBytes; i-- > kMagicBytes;) {
    size = (size << 8) | static_cast<uint8_t>(header[i]);
  }
  return size;
}

// Returns the number of bytes wanted of the frame that begins in `received`, as
// far as that is known.
absl::StatusOr<size_t> BytesWanted(const std::string& received) {
  if (received.size() < kHeaderBytes) return kHeaderBytes;
  const uint32_t payload = PayloadBytes(received);
  if (payload > shm::kHelloBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a Hello of ", payload, " bytes; at most ", shm::kHelloBytesMax));
  }
  return kHeaderBytes + payload;
}

// Returns whether the bytes received so far begin with HTTP/2's preface.
bool SpeaksHttp2(int fd) {
  char begin[kMagicBytes];
  return ::recv(fd, begin, sizeof(begin), MSG_PEEK | MSG_DONTWAIT) ==
             sizeof(begin) &&
         std::memcmp(begin, kHttp2Magic, sizeof(begin)) == 0;
}

absl::Status NotOurProtocol(absl::string_view begin, bool is_unix) {
  if (begin[0] == kTlsRecord && is_unix) {
    return absl::FailedPreconditionError(
        "the connection began with TLS, and a unix socket has none: use "
        "unix:PATH or grpc:unix:PATH, without credentials of TLS");
  }
  if (begin[0] == kTlsRecord) {
    return absl::FailedPreconditionError(
        "the connection began with TLS, and the daemon speaks none there: use "
        "grpc:HOST:PORT, or give the daemon a certificate (tls in its "
        "configuration)");
  }
  return absl::InvalidArgumentError(
      "this is optstated's socket; the connection began neither with an "
      "optstate session nor with gRPC (HTTP/2 without TLS)");
}

// A fault that the operator or the client has to mend is worth a line.
void LogRefusal(const PeerCredentials& peer, const absl::Status& status) {
  observe::LogOfPeer(
      absl::IsFailedPrecondition(status) || absl::IsUnauthenticated(status)
          ? spdlog::level::info
          : spdlog::level::debug,
      "connection refused", peer.quota_name(),
      "connection of {} pid {} refused: {}", peer.quota_name(), peer.pid,
      status.ToString());
}

}  // namespace

Handshakes::Handshakes(os::EventLoop* loop, absl::Duration timeout,
                       Callbacks callbacks)
    : loop_(loop), timeout_(timeout), callbacks_(std::move(callbacks)) {}

Handshakes::~Handshakes() {
  for (auto& [fd, pending] : pending_) {
    loop_->Unwatch(fd);
    loop_->Cancel(pending.timer);
  }
}

absl::Status Handshakes::CheckRoom(const PeerCredentials& peer) const {
  const auto found = pending_by_peer_.find(peer.quota_name());
  const size_t of_peer = found == pending_by_peer_.end() ? 0 : found->second;
  if (of_peer >= kPendingMax / 2) {
    return absl::ResourceExhaustedError(absl::StrCat(
        peer.quota_name(), " has ", of_peer,
        " connections that have not said yet what they want; try again"));
  }
  if (peer.is_operator() || pending_of_strangers_ < kPendingMax) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      "too many connections that have not said yet what they want; try again");
}

void Handshakes::Start(UniqueFd fd, const PeerCredentials& peer,
                       const absl::Status& verdict) {
  absl::Status status = CheckRoom(peer);
  const int raw = fd.get();
  if (status.ok()) {
    // Edge-triggered: fewer bytes than a decision needs stay in the socket,
    // and must not wake the loop again and again.
    status = loop_->Watch(raw, EPOLLIN | EPOLLRDHUP | EPOLLET,
                          [this, raw](uint32_t) { OnEvents(raw); });
  }
  if (!status.ok()) {
    spdlog::debug("connection of {} pid {} refused: {}", peer.quota_name(),
                  peer.pid, status.ToString());
    if (callbacks_.on_grpc_refused != nullptr && SpeaksHttp2(raw)) {
      callbacks_.on_grpc_refused(std::move(fd), status);
    } else {
      SendRefusal(raw, status);
    }
    return;
  }
  Pending pending{std::move(fd), peer, verdict, {}, ""};
  pending.timer = loop_->RunAfter(timeout_, [this, raw] {
    Refuse(raw, absl::DeadlineExceededError(
                    "no complete Hello arrived in time after connecting"));
  });
  pending_.emplace(raw, std::move(pending));
  ++pending_by_peer_[peer.quota_name()];
  if (!peer.is_operator()) ++pending_of_strangers_;
}

void Handshakes::OnEvents(int fd) {
  const auto found = pending_.find(fd);
  if (found == pending_.end()) return;
  Progress progress = Progress::kWaiting;
  const absl::Status status = Advance(&found->second, &progress);
  if (!status.ok()) return Refuse(fd, status);
  if (progress == Progress::kWaiting) return;

  Pending done = Take(fd);
  if (done.received.empty()) return FinishGrpc(std::move(done));
  v1::Hello hello;
  if (!hello.ParseFromArray(
          done.received.data() + kHeaderBytes,
          static_cast<int>(done.received.size() - kHeaderBytes))) {
    spdlog::debug("malformed Hello of {} pid {}", done.peer.quota_name(),
                  done.peer.pid);
    SendRefusal(done.fd.get(),
                absl::InvalidArgumentError("the Hello is malformed"));
    return;
  }
  callbacks_.on_hello(std::move(done.fd), done.peer, std::move(hello));
}

void Handshakes::FinishGrpc(Pending done) {
  if (done.verdict.ok()) {
    return callbacks_.on_grpc(std::move(done.fd), done.peer);
  }
  LogRefusal(done.peer, done.verdict);
  if (callbacks_.on_grpc_refused != nullptr) {
    callbacks_.on_grpc_refused(std::move(done.fd), done.verdict);
  }
}

absl::Status Handshakes::Advance(Pending* pending, Progress* progress) {
  if (!pending->received.empty()) return ReadHello(pending, progress);
  char begin[kMagicBytes];
  const ssize_t count =
      ::recv(pending->fd.get(), begin, sizeof(begin), MSG_PEEK | MSG_DONTWAIT);
  if (count < 0) {
    if (errno == EAGAIN) return absl::OkStatus();
    return OsError(errno, "recv");
  }
  if (count == 0) return absl::UnavailableError("closed by peer");
  const auto size = static_cast<size_t>(count);
  if (std::memcmp(begin, shm::kFrameMagic, size) == 0) {
    return ReadHello(pending, progress);
  }
  if (std::memcmp(begin, kHttp2Magic, size) != 0) {
    return NotOurProtocol({begin, size}, pending->peer.is_unix());
  }
  if (size == kMagicBytes) *progress = Progress::kDone;
  return absl::OkStatus();
}

absl::Status Handshakes::ReadHello(Pending* pending, Progress* progress) {
  while (true) {
    OPTSTATE_ASSIGN_OR_RETURN(const size_t wanted,
                              BytesWanted(pending->received));
    const size_t have = pending->received.size();
    if (have == wanted) {
      *progress = Progress::kDone;
      return absl::OkStatus();
    }
    char buffer[4096];
    // recv() without room for control messages: the kernel drops fds that a
    // stranger attached.
    const ssize_t count =
        ::recv(pending->fd.get(), buffer,
               std::min(sizeof(buffer), wanted - have), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return absl::OkStatus();
    if (count < 0) return OsError(errno, "recv");
    if (count == 0) return absl::UnavailableError("closed by peer");
    pending->received.append(buffer, static_cast<size_t>(count));
    if (std::memcmp(pending->received.data(), shm::kFrameMagic,
                    std::min(pending->received.size(), kMagicBytes)) != 0) {
      return NotOurProtocol(pending->received, pending->peer.is_unix());
    }
    if (pending->received.size() >= kMagicBytes) {
      OPTSTATE_RETURN_IF_ERROR(pending->verdict);
    }
  }
}

Handshakes::Pending Handshakes::Take(int fd) {
  auto node = pending_.extract(fd);
  loop_->Unwatch(fd);
  loop_->Cancel(node.mapped().timer);
  const PeerCredentials& peer = node.mapped().peer;
  const auto count = pending_by_peer_.find(peer.quota_name());
  if (--count->second == 0) pending_by_peer_.erase(count);
  if (!peer.is_operator()) --pending_of_strangers_;
  return std::move(node.mapped());
}

void Handshakes::Refuse(int fd, const absl::Status& status) {
  const Pending pending = Take(fd);
  LogRefusal(pending.peer, status);
  SendRefusal(pending.fd.get(), status);
}

}  // namespace optstate::accept
