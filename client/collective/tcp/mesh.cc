#include "client/collective/tcp/mesh.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/collective/printable.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// The wait for the whole text of an abort, whose head has come.
constexpr absl::Duration kAbortTextWait = absl::Milliseconds(200);
// The peers that a time-out names.
constexpr size_t kNamedMax = 8;

int PollTimeoutMs(absl::Time deadline) {
  const absl::Duration left =
      std::clamp(deadline - absl::Now(), absl::ZeroDuration(), absl::Hours(1));
  return static_cast<int>(
      absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))));
}

bool IsTemporary(int error) { return error == EAGAIN || error == EINTR; }

}  // namespace

absl::StatusOr<std::unique_ptr<Mesh>> Mesh::Make(
    uint32_t rank, std::vector<UniqueFd> sockets) {
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.ok()) return OsError(errno, "eventfd");
  return std::unique_ptr<Mesh>(
      new Mesh(rank, std::move(sockets), std::move(wake)));
}

Mesh::Mesh(uint32_t rank, std::vector<UniqueFd> sockets, UniqueFd wake)
    : rank_(rank),
      links_(sockets.size()),
      wake_(std::move(wake)),
      failed_rank_(rank) {
  for (size_t i = 0; i < sockets.size(); ++i) {
    links_[i].socket = std::move(sockets[i]);
  }
  polls_.reserve(links_.size());
  polled_.reserve(links_.size());
}

void Mesh::Wake() {
  const uint64_t one = 1;
  // A full counter wakes as well.
  const ssize_t written = write(wake_.get(), &one, sizeof(one));
  static_cast<void>(written);
}

absl::Status Mesh::Exchange(const Frame& frame,
                            absl::Span<const PeerPayloads> payloads,
                            absl::Time deadline) {
  frame_ = frame;
  frame_.from = rank_;
  for (uint32_t peer = 0; peer < links_.size(); ++peer) {
    if (peer == rank_) continue;
    Link& link = links_[peer];
    Frame head = frame_;
    head.payload_bytes = payloads[peer].send.size();
    link.head_out = Encode(head);
    link.sent = 0;
    link.send_bytes = Frame::kBytes + payloads[peer].send.size();
    link.received = 0;
    link.receive_bytes = Frame::kBytes + payloads[peer].receive.size();
    link.is_closed = false;
  }
  while (ListPolls()) {
    const int count =
        poll(polls_.data(), polls_.size(), PollTimeoutMs(deadline));
    if (count < 0 && errno != EINTR) return OsError(errno, "poll");
    if (count > 0 && polls_[0].revents != 0) {
      return absl::AbortedError("this rank has aborted");
    }
    for (size_t i = 0; count > 0 && i < polled_.size(); ++i) {
      if (polls_[i + 1].revents == 0) continue;
      OPTSTATE_RETURN_IF_ERROR(
          Advance(polled_[i], payloads[polled_[i]], polls_[i + 1].revents));
    }
    // After the look at the sockets: what has come in time counts.
    if (absl::Now() >= deadline && ListPolls()) return TimedOut();
  }
  return absl::OkStatus();
}

bool Mesh::ListPolls() {
  polls_.clear();
  polled_.clear();
  polls_.push_back({.fd = wake_.get(), .events = POLLIN, .revents = 0});
  bool is_going = false;
  for (uint32_t peer = 0; peer < links_.size(); ++peer) {
    if (peer == rank_) continue;
    const Link& link = links_[peer];
    int events = 0;
    if (!link.is_sent()) events |= POLLOUT;
    if (!link.is_received()) events |= POLLIN;
    is_going |= events != 0;
    // Its own next frame may have come, which is not looked at yet; but an
    // abort closes the peer's side. A peer that has failed reads nothing more,
    // so this is looked for while this rank still sends.
    if (link.is_received() && !link.is_closed) events |= POLLRDHUP;
    if (events == 0) continue;
    polls_.push_back({.fd = link.socket.get(),
                      .events = static_cast<int16_t>(events),
                      .revents = 0});
    polled_.push_back(peer);
  }
  return is_going;
}

absl::Status Mesh::Advance(uint32_t peer, const PeerPayloads& payloads,
                           int16_t events) {
  Link& link = links_[peer];
  if ((events & ~POLLOUT) != 0) {
    if (link.is_received()) {
      OPTSTATE_RETURN_IF_ERROR(LookBehind(peer));
    } else {
      OPTSTATE_RETURN_IF_ERROR(Receive(peer, payloads));
    }
  }
  // An error of the socket shows in the attempt to send.
  if (!link.is_sent() && (events & (POLLOUT | POLLERR | POLLHUP)) != 0) {
    return Send(peer, payloads);
  }
  return absl::OkStatus();
}

absl::Status Mesh::Send(uint32_t peer, const PeerPayloads& payloads) {
  Link& link = links_[peer];
  std::array<iovec, 2> parts = {};
  size_t count = 0;
  if (link.sent < Frame::kBytes) {
    parts[count++] = {.iov_base = link.head_out.data() + link.sent,
                      .iov_len = Frame::kBytes - link.sent};
  }
  const size_t payload_sent =
      link.sent < Frame::kBytes ? 0 : link.sent - Frame::kBytes;
  if (payload_sent < payloads.send.size()) {
    // The kernel only reads what it sends.
    parts[count++] = {
        .iov_base = const_cast<std::byte*>(payloads.send.data()) + payload_sent,
        .iov_len = payloads.send.size() - payload_sent};
  }
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t sent =
      sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0) {
    link.sent += static_cast<size_t>(sent);
    return absl::OkStatus();
  }
  const int error = errno;
  if (IsTemporary(error)) return absl::OkStatus();
  // The peer may have said why it has gone.
  if (link.is_received()) {
    OPTSTATE_RETURN_IF_ERROR(LookBehind(peer));
  } else if (link.received < Frame::kBytes) {
    OPTSTATE_RETURN_IF_ERROR(Receive(peer, payloads));
  }
  return Lost(peer, error);
}

absl::Status Mesh::Receive(uint32_t peer, const PeerPayloads& payloads) {
  Link& link = links_[peer];
  while (!link.is_received()) {
    std::byte* to = nullptr;
    size_t size = 0;
    if (link.received < Frame::kBytes) {
      to = link.head_in.data() + link.received;
      size = Frame::kBytes - link.received;
    } else {
      const size_t payload_received = link.received - Frame::kBytes;
      to = payloads.receive.data() + payload_received;
      size = payloads.receive.size() - payload_received;
    }
    const ssize_t count = recv(link.socket.get(), to, size, MSG_DONTWAIT);
    if (count < 0) {
      return IsTemporary(errno) ? absl::OkStatus() : Lost(peer, errno);
    }
    if (count == 0) return Lost(peer, 0);
    const bool had_head = link.received >= Frame::kBytes;
    link.received += static_cast<size_t>(count);
    if (!had_head && link.received >= Frame::kBytes) {
      OPTSTATE_RETURN_IF_ERROR(CheckHead(peer, payloads));
    }
  }
  return absl::OkStatus();
}

absl::Status Mesh::CheckHead(uint32_t peer, const PeerPayloads& payloads) {
  absl::StatusOr<Frame> head = Decode(links_[peer].head_in);
  if (!head.ok()) {
    return Annotate(head.status(), absl::StrCat("rank ", peer, " has sent"));
  }
  if (head->operation == Operation::kAbort) return ReadAbort(peer, *head);
  Frame expected = frame_;
  expected.from = peer;
  expected.payload_bytes = payloads.receive.size();
  return CheckExpected(expected, *head);
}

absl::Status Mesh::LookBehind(uint32_t peer) {
  Link& link = links_[peer];
  Frame::Bytes next = {};
  const ssize_t count = recv(link.socket.get(), next.data(), next.size(),
                             MSG_PEEK | MSG_DONTWAIT);
  const int error = count < 0 ? errno : 0;
  if (count < 0 && IsTemporary(error)) return absl::OkStatus();
  if (count == static_cast<ssize_t>(next.size())) {
    const absl::StatusOr<Frame> head = Decode(next);
    if (head.ok() && head->operation == Operation::kAbort) {
      const ssize_t taken =
          recv(link.socket.get(), next.data(), next.size(), MSG_DONTWAIT);
      static_cast<void>(taken);  // it is there
      return ReadAbort(peer, *head);
    }
  }
  // A peer that lacks a part of this rank's frame has not taken part.
  if (!link.is_sent()) return Lost(peer, error);
  // The peer has taken part in this exchange and gone; who needs it again finds
  // it gone.
  link.is_closed = true;
  return absl::OkStatus();
}

absl::Status Mesh::ReadAbort(uint32_t peer, const Frame& head) {
  const auto size = static_cast<size_t>(
      std::min<uint64_t>(head.payload_bytes, kAbortTextBytesMax));
  const absl::Time deadline = absl::Now() + kAbortTextWait;
  std::string text(size, '\0');
  size_t received = 0;
  while (received < size) {
    pollfd entry = {
        .fd = links_[peer].socket.get(), .events = POLLIN, .revents = 0};
    const int ready = poll(&entry, 1, PollTimeoutMs(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) break;
    const ssize_t count = recv(links_[peer].socket.get(), &text[received],
                               size - received, MSG_DONTWAIT);
    if (count <= 0) break;
    received += static_cast<size_t>(count);
  }
  text.resize(received);
  failed_rank_ = head.root < links_.size() ? head.root : peer;
  failed_text_ = Printable(text);
  return absl::AbortedError(absl::StrCat(
      "rank ", failed_rank_, " has failed: ",
      failed_text_.empty() ? "it has not said why" : failed_text_));
}

absl::Status Mesh::Lost(uint32_t peer, int error) const {
  const std::string what =
      absl::StrCat("in ", Describe(frame_), " rank ", peer);
  if (error == 0) {
    return absl::UnavailableError(absl::StrCat(
        what, " has closed its connection: it has ended or failed"));
  }
  const absl::Status status = OsError(error, what);
  return absl::UnavailableError(absl::StrCat(
      status.message(), ": it has ended, or the network to it is down"));
}

absl::Status Mesh::TimedOut() const {
  std::string waiting;
  size_t count = 0;
  for (uint32_t peer = 0; peer < links_.size(); ++peer) {
    if (peer == rank_) continue;
    if (links_[peer].is_received() && links_[peer].is_sent()) continue;
    if (++count > kNamedMax) continue;
    absl::StrAppend(&waiting, waiting.empty() ? "" : ", ", peer);
    if (links_[peer].is_received()) {
      absl::StrAppend(&waiting, " (does not read)");
    }
  }
  if (count > kNamedMax) {
    absl::StrAppend(&waiting, " and ", count - kNamedMax, " more");
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", rank_, " has waited in ", Describe(frame_), " for ranks ",
      waiting, ", which have not come within the time-out"));
}

void Mesh::Leave(const absl::Status& why) {
  std::string text = failed_text_;
  if (text.empty()) {
    text =
        absl::StrCat(absl::StatusCodeToString(why.code()), ": ", why.message());
  }
  text.resize(std::min(text.size(), kAbortTextBytesMax));
  const Frame::Bytes head = Encode({.operation = Operation::kAbort,
                                    .type = ElementType::kUint8,
                                    .from = rank_,
                                    .root = failed_rank_,
                                    .sequence = frame_.sequence,
                                    .exchange = 0,
                                    .count = 0,
                                    .payload_bytes = text.size()});
  std::string bytes(reinterpret_cast<const char*>(head.data()), head.size());
  bytes += text;
  for (Link& link : links_) {
    if (!link.socket.ok()) continue;
    // Within a frame an abort would be taken for its payload.
    if (link.is_sent() || link.sent == 0) {
      const ssize_t sent = send(link.socket.get(), bytes.data(), bytes.size(),
                                MSG_NOSIGNAL | MSG_DONTWAIT);
      static_cast<void>(sent);  // without it the peer sees the end alone
    }
    // The socket stays open: closing it with data unread would reset it, and
    // the peer would not read the abort.
    shutdown(link.socket.get(), SHUT_WR);
  }
}

}  // namespace optstate::client
