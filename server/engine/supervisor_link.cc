#include "server/engine/supervisor_link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/engine/control_socket.h"
#include "spdlog/spdlog.h"

namespace optstate::engine {
namespace {

using Request = v1::SupervisorRequest;

bool BringsFd(const Request& request) {
  return request.has_supervise() || request.has_kept_gradients() ||
         request.has_adopt_connection();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SupervisorLink>> SupervisorLink::Start(
    UniqueFd listener, bool ends_with_supervisor) {
  OPTSTATE_RETURN_IF_ERROR(TakeListenerOver(listener.get()));
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.ok()) return OsError(errno, "epoll_create1");
  UniqueFd collected(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!collected.ok()) return OsError(errno, "eventfd");
  std::unique_ptr<SupervisorLink> link(
      new SupervisorLink(std::move(listener), std::move(epoll),
                         std::move(collected), ends_with_supervisor));
  if (!link->WatchForInput(link->listener_.get()) ||
      !link->WatchForInput(link->collected_event_.get())) {
    return OsError(errno, "epoll_ctl");
  }
  return link;
}

SupervisorLink::SupervisorLink(UniqueFd listener, UniqueFd epoll,
                               UniqueFd collected, bool ends_with_supervisor)
    : listener_(std::move(listener)),
      epoll_(std::move(epoll)),
      collected_event_(std::move(collected)),
      ends_with_supervisor_(ends_with_supervisor) {}

bool SupervisorLink::WatchForInput(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void SupervisorLink::Watch(int operation, uint32_t events) {
  epoll_event event{};
  event.events = events;
  if (::epoll_ctl(epoll_.get(), operation, connection_.get(), &event) != 0) {
    spdlog::error(
        "{}", OsError(errno, "epoll_ctl of the control connection").ToString());
  }
}

void SupervisorLink::Collect() {
  while (std::optional<SupervisorMessage> message = ReceiveNext()) {
    collected_.push_back(*std::move(message));
    ::eventfd_write(collected_event_.get(), 1);
  }
}

std::optional<SupervisorMessage> SupervisorLink::Receive() {
  if (collected_.empty()) return ReceiveNext();
  SupervisorMessage message = std::move(collected_.front());
  collected_.pop_front();
  eventfd_t written;
  if (collected_.empty()) ::eventfd_read(collected_event_.get(), &written);
  return message;
}

std::optional<SupervisorMessage> SupervisorLink::ReceiveNext() {
  while (!ended_) {
    std::optional<SupervisorMessage> message;
    // All messages of one supervisor are read before the next one's: the fds
    // that a dying supervisor has sent may be the only copies.
    if (connection_.ok()) message = ReceiveFrom(connection_.get());
    if (!message.has_value()) {
      if (ended_ || !AcceptNext()) return std::nullopt;
      continue;
    }
    if (!IsWelcome(*message)) continue;
    if (message->request.has_stop()) {
      ended_ = true;
      return std::nullopt;
    }
    return message;
  }
  return std::nullopt;
}

bool SupervisorLink::AcceptNext() {
  while (true) {
    absl::StatusOr<UniqueFd> next = AcceptSupervisor(listener_.get());
    if (absl::IsUnavailable(next.status())) return false;
    if (!next.ok()) {
      spdlog::error("supervisor refused: {}", next.status().ToString());
      if (absl::IsPermissionDenied(next.status())) continue;
      return false;
    }
    if (connection_.ok()) spdlog::info("another supervisor takes over");
    supervised_ = false;
    absl::MutexLock lock(&mutex_);
    may_send_ = false;
    awaits_room_ = false;
    connection_ = *std::move(next);
    Watch(EPOLL_CTL_ADD, EPOLLIN);
    return true;
  }
}

void SupervisorLink::Disconnect() {
  if (ends_with_supervisor_) {
    ended_ = true;
  } else {
    spdlog::warn("the supervisor is gone; serving on without it");
  }
  supervised_ = false;
  absl::MutexLock lock(&mutex_);
  may_send_ = false;
  awaits_room_ = false;
  connection_.reset();
}

std::optional<SupervisorMessage> SupervisorLink::ReceiveFrom(int connection) {
  while (true) {
    absl::StatusOr<std::optional<Packet>> packet = ReceivePacket(connection);
    if (absl::IsInvalidArgument(packet.status())) {
      spdlog::error("control packet refused: {}", packet.status().ToString());
      continue;
    }
    if (!packet.ok()) {
      Disconnect();
      return std::nullopt;
    }
    if (!packet->has_value()) return std::nullopt;
    SupervisorMessage message;
    message.fd = std::move((*packet)->fd);
    const std::string& bytes = (*packet)->bytes;
    if (message.request.ParseFromArray(bytes.data(),
                                       static_cast<int>(bytes.size()))) {
      return message;
    }
    spdlog::error("control packet refused: {} bytes are no SupervisorRequest",
                  bytes.size());
  }
}

bool SupervisorLink::IsWelcome(const SupervisorMessage& message) {
  const Request& request = message.request;
  if (request.request_case() == Request::REQUEST_NOT_SET) {
    spdlog::error("control packet refused: a request that is not known here");
    return false;
  }
  if (BringsFd(request) != message.fd.ok()) {
    spdlog::error("control packet refused: request {} {} an fd",
                  static_cast<int>(request.request_case()),
                  message.fd.ok() ? "takes no" : "misses");
    return false;
  }
  if (request.has_supervise()) {
    supervised_ = true;
    absl::MutexLock lock(&mutex_);
    may_send_ = true;
  }
  if (!supervised_) {
    spdlog::error("control packet refused: request {} before Supervise",
                  static_cast<int>(request.request_case()));
  }
  return supervised_;
}

bool SupervisorLink::Send(const v1::EngineEvent& event, int fd) {
  absl::MutexLock lock(&mutex_);
  if (!may_send_ || awaits_room_) return false;
  const int error =
      SendPacket(connection_.get(), event.SerializeAsString(), fd);
  if (error == 0) return true;
  if (error == EAGAIN || error == ETOOMANYREFS) {
    awaits_room_ = true;
    Watch(EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    return false;
  }
  // The connection's end is handled where it is read.
  if (error != EPIPE && error != ECONNRESET) {
    spdlog::error("{}", OsError(error, "send to the supervisor").ToString());
  }
  return false;
}

bool SupervisorLink::TakeWritable() {
  absl::MutexLock lock(&mutex_);
  if (!awaits_room_) return false;
  epoll_event events[3];
  const int count = ::epoll_wait(epoll_.get(), events, 3, 0);
  bool writable = false;
  for (int i = 0; i < count; ++i) {
    writable |= (events[i].events & EPOLLOUT) != 0;
  }
  if (!writable) return false;
  awaits_room_ = false;
  Watch(EPOLL_CTL_MOD, EPOLLIN);
  return true;
}

}  // namespace optstate::engine
