#include "client/endpoint/tls_tunnel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/endpoint/interrupt.h"
#include "client/endpoint/tunnel_threads.h"
#include "proto/tls/tls_context.h"
#include "proto/tls/tls_relay.h"
#include "proto/tls/tls_stream.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// How a record of TLS begins that a daemon answers a ClientHello with.
constexpr char kHandshakeRecord = 0x16;
constexpr char kAlertRecord = 0x15;

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<std::shared_ptr<const tls::TlsContext>> MakeContext() {
  const tls::TlsFiles files = {
      .certificate = Variable("OPTSTATE_TLS_CERTIFICATE"),
      .key = Variable("OPTSTATE_TLS_KEY"),
      .ca = Variable("OPTSTATE_TLS_CA")};
  auto context = tls::TlsContext::Client(files);
  if (context.ok()) return context;
  return Annotate(context.status(),
                  "OPTSTATE_TLS_CA, OPTSTATE_TLS_CERTIFICATE, "
                  "OPTSTATE_TLS_KEY");
}

void SetBlocking(int fd, bool blocking) {
  const int flags = ::fcntl(fd, F_GETFL);
  ::fcntl(fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

// Waits for one of `events`.
absl::Status Await(int fd, int16_t events, absl::Time deadline,
                   const InterruptCheck& interrupted) {
  while (true) {
    pollfd entry = {.fd = fd, .events = events, .revents = 0};
    const absl::Duration left = std::clamp(
        deadline - absl::Now(), absl::ZeroDuration(), kInterruptSlice);
    const int count = ::poll(&entry, 1,
                             static_cast<int>(absl::ToInt64Milliseconds(
                                 absl::Ceil(left, absl::Milliseconds(1)))));
    if (count > 0) return absl::OkStatus();
    if (count < 0 && errno != EINTR) return OsError(errno, "poll");
    OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError("no answer to the TLS handshake");
    }
  }
}

absl::Status SendAll(int fd, std::string* bytes, absl::Time deadline,
                     const InterruptCheck& interrupted) {
  while (!bytes->empty()) {
    const ssize_t count =
        ::send(fd, bytes->data(), bytes->size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count >= 0) {
      bytes->erase(0, static_cast<size_t>(count));
    } else if (errno == EAGAIN) {
      OPTSTATE_RETURN_IF_ERROR(Await(fd, POLLOUT, deadline, interrupted));
    } else if (errno != EINTR) {
      return OsError(errno, "send");
    }
  }
  return absl::OkStatus();
}

// Receives something of the handshake.
absl::Status Receive(int fd, bool is_first, tls::TlsStream* stream,
                     absl::Time deadline, const InterruptCheck& interrupted) {
  OPTSTATE_RETURN_IF_ERROR(Await(fd, POLLIN, deadline, interrupted));
  char buffer[16 << 10];
  const ssize_t count = ::recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
    return absl::OkStatus();
  }
  if (count < 0) return OsError(errno, "recv");
  if (count == 0) {
    return absl::UnavailableError(
        "the connection was closed within the TLS handshake");
  }
  if (is_first && buffer[0] != kHandshakeRecord && buffer[0] != kAlertRecord) {
    return absl::FailedPreconditionError(
        "the other side does not speak TLS there: if it is a daemon, use "
        "grpc:HOST:PORT, or give the daemon a certificate (tls in its "
        "configuration)");
  }
  stream->TakeEncrypted({buffer, static_cast<size_t>(count)});
  return absl::OkStatus();
}

absl::Status ShakeHands(int fd, tls::TlsStream* stream, absl::Time deadline,
                        const InterruptCheck& interrupted) {
  for (bool is_first = true;; is_first = false) {
    const absl::Status status = stream->Handshake();
    const absl::Status sent =
        SendAll(fd, &stream->output(), deadline, interrupted);
    OPTSTATE_RETURN_IF_ERROR(status);
    OPTSTATE_RETURN_IF_ERROR(sent);
    if (stream->is_ready()) return absl::OkStatus();
    OPTSTATE_RETURN_IF_ERROR(
        Receive(fd, is_first, stream, deadline, interrupted));
  }
}

absl::StatusOr<UniqueFd> Open(UniqueFd socket, const Endpoint& endpoint,
                              absl::Time deadline,
                              const InterruptCheck& interrupted) {
  OPTSTATE_ASSIGN_OR_RETURN(auto context, MakeContext());
  std::string name = Variable("OPTSTATE_TLS_SERVER_NAME");
  if (name.empty()) name = endpoint.host;
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<tls::TlsStream> stream,
                            tls::TlsStream::Connect(std::move(context), name));
  SetBlocking(socket.get(), false);
  OPTSTATE_RETURN_IF_ERROR(
      ShakeHands(socket.get(), stream.get(), deadline, interrupted));
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return OsError(errno, "socketpair for a TLS connection");
  }
  UniqueFd ours(ends[0]);
  UniqueFd inside(ends[1]);
  SetBlocking(inside.get(), false);
  OPTSTATE_RETURN_IF_ERROR(RunRelay(std::make_unique<tls::TlsRelay>(
      std::move(socket), std::move(inside), std::move(stream))));
  return ours;
}

}  // namespace

absl::StatusOr<UniqueFd> OpenTlsTunnel(UniqueFd socket,
                                       const Endpoint& endpoint,
                                       absl::Time deadline,
                                       const InterruptCheck& interrupted) {
  absl::StatusOr<UniqueFd> opened =
      Open(std::move(socket), endpoint, deadline, interrupted);
  if (opened.ok() || absl::IsCancelled(opened.status())) return opened;
  return Annotate(opened.status(),
                  absl::StrCat("TLS with ", endpoint.host, ":", endpoint.port));
}

}  // namespace optstate::client
