#include "server/accept/acceptor.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/types/status_macros.h"
#include "server/accept/refusal.h"
#include "server/observe/counters.h"
#include "server/observe/peer_log.h"

namespace optstate::accept {
namespace {

// Limit of connections per wake-up, so that a flood leaves time for everything
// else.
constexpr int kAcceptsPerWakeUp = 64;
constexpr absl::Duration kPause = absl::Milliseconds(100);

// A peer whose machine vanished without a word is noticed after a minute; one
// that is stopped is not mistaken for it, because its kernel answers.
constexpr int kKeepAliveIdleS = 30;
constexpr int kKeepAliveIntervalS = 10;
constexpr int kKeepAliveProbes = 3;

void TuneTcp(int fd) {
  const auto set = [fd](int level, int option, int value) {
    (void)::setsockopt(fd, level, option, &value, sizeof(value));
  };
  // Requests are small and wait for their answers.
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdleS);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveIntervalS);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
}

UniqueFd OpenSpareFd() {
  return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

}  // namespace

Acceptor::Acceptor(os::EventLoop* loop,
                   std::vector<std::unique_ptr<Listener>> listeners,
                   Callback on_connection, access::UnixRoles roles)
    : loop_(loop),
      listeners_(std::move(listeners)),
      on_connection_(std::move(on_connection)),
      roles_(std::move(roles)),
      spare_fd_(OpenSpareFd()) {}

Acceptor::~Acceptor() { Stop(); }

absl::Status Acceptor::Start() {
  for (const auto& listener : listeners_) {
    OPTSTATE_RETURN_IF_ERROR(loop_->Watch(
        listener->fd(), EPOLLIN,
        [this, raw = listener.get()](uint32_t) { OnReadable(*raw); }));
  }
  return absl::OkStatus();
}

void Acceptor::Stop() {
  if (paused_) loop_->Cancel(resume_timer_);
  for (const auto& listener : listeners_) loop_->Unwatch(listener->fd());
  listeners_.clear();
}

void Acceptor::Hold() {
  held_ = true;
  for (const auto& listener : listeners_) loop_->SetEvents(listener->fd(), 0);
}

void Acceptor::Release() {
  held_ = false;
  if (!paused_) Resume();
}

void Acceptor::OnReadable(const Listener& listener) {
  for (int i = 0; i < kAcceptsPerWakeUp; ++i) {
    if (!AcceptOne(listener)) return;
  }
}

bool Acceptor::AcceptOne(const Listener& listener) {
  UniqueFd fd(
      ::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd.ok()) return OnAcceptError(listener, errno);
  observe::Count(observe::Counted::kConnectionAccepted);
  if (!listener.is_unix()) TuneTcp(fd.get());
  const absl::StatusOr<PeerCredentials> peer =
      GetPeerCredentials(fd.get(), listener.is_unix(), roles_);
  if (!peer.ok()) {
    observe::LogRepeated(spdlog::level::warn, "connection dropped",
                         listener.name(), "connection on {} dropped: {}",
                         listener.name(), peer.status().ToString());
    return true;
  }
  on_connection_(std::move(fd), *peer);
  return true;
}

bool Acceptor::OnAcceptError(const Listener& listener, int error_number) {
  switch (error_number) {
    case EAGAIN:
      return false;
    case EINTR:
    case ECONNABORTED:  // gone before the accept
    case EPROTO:
    case EPERM:  // a firewall rule
      return true;
    case EMFILE:
      if (RefuseWithSpareFd(listener)) return true;
      break;
    default:
      break;
  }
  LogTrouble(listener, absl::StrCat("accept failed, pausing: ",
                                    std::strerror(error_number)));
  Pause();
  return false;
}

bool Acceptor::RefuseWithSpareFd(const Listener& listener) {
  if (!spare_fd_.ok()) return false;
  spare_fd_.reset();
  UniqueFd fd(
      ::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  const bool accepted = fd.ok();
  if (accepted) {
    LogTrouble(listener, "connection refused: out of file descriptors");
    SendRefusal(fd.get(), absl::ResourceExhaustedError(
                              "the daemon is out of file descriptors: close "
                              "sessions or raise its limit (ulimit -n)"));
  }
  fd.reset();
  spare_fd_ = OpenSpareFd();
  return accepted && spare_fd_.ok();
}

// A flood of connections causes no flood of lines.
void Acceptor::LogTrouble(const Listener& listener, absl::string_view what) {
  observe::LogRepeated(spdlog::level::warn, "trouble with accepting",
                       listener.name(), "{}: {}", listener.name(),
                       std::string(what));
}

void Acceptor::Pause() {
  if (paused_) return;
  paused_ = true;
  for (const auto& listener : listeners_) loop_->SetEvents(listener->fd(), 0);
  resume_timer_ = loop_->RunAfter(kPause, [this] { Resume(); });
}

void Acceptor::Resume() {
  paused_ = false;
  if (!spare_fd_.ok()) spare_fd_ = OpenSpareFd();
  if (held_) return;
  for (const auto& listener : listeners_) {
    loop_->SetEvents(listener->fd(), EPOLLIN);
  }
}

}  // namespace optstate::accept
