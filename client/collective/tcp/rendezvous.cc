#include "client/collective/tcp/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/collective/tcp/address_record.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/endpoint.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// Connections that have not said who they are, beside those that the missing
// ranks may have. The oldest makes place.
constexpr size_t kStrangersMax = 64;
// The wait within poll(), which ends early when something happens.
constexpr absl::Duration kPollMax = absl::Hours(1);

int PollTimeoutMs(absl::Time deadline) {
  const absl::Duration left =
      std::clamp(deadline - absl::Now(), absl::ZeroDuration(), kPollMax);
  return static_cast<int>(
      absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))));
}

std::string KeyOf(const RendezvousOptions& options, uint32_t rank) {
  return absl::StrCat(options.name, "-rank-", rank);
}

absl::Status DrawSecret(AddressRecord::Secret* secret) {
  // Requests of up to 256 bytes are answered whole.
  const ssize_t count = getrandom(secret->data(), secret->size(), 0);
  if (count == static_cast<ssize_t>(secret->size())) return absl::OkStatus();
  return OsError(count < 0 ? errno : EIO, "getrandom");
}

// Makes a socket what the mesh needs. How long a peer may take is the
// operation's time-out alone: a rank that computes for minutes reads nothing
// meanwhile.
absl::Status Tune(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    return OsError(errno, "fcntl(O_NONBLOCK)");
  }
  const int on = 1;
  const int off = 0;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &off, sizeof(off));
  return absl::OkStatus();
}

// Sends or receives a whole greeting over a non-blocking socket.
enum class Direction { kSend, kReceive };
absl::Status Transfer(int fd, Direction direction, absl::Time deadline,
                      Greeting::Bytes* bytes) {
  size_t done = 0;
  while (done < bytes->size()) {
    const bool sends = direction == Direction::kSend;
    const ssize_t count =
        sends
            ? send(fd, bytes->data() + done, bytes->size() - done, MSG_NOSIGNAL)
            : recv(fd, bytes->data() + done, bytes->size() - done, 0);
    if (count > 0) {
      done += static_cast<size_t>(count);
      continue;
    }
    if (count == 0) return absl::UnavailableError("it has hung up");
    if (errno != EAGAIN && errno != EINTR) return OsError(errno, "greeting");
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError("it has not answered in time");
    }
    pollfd entry = {.fd = fd,
                    .events = static_cast<int16_t>(sends ? POLLOUT : POLLIN),
                    .revents = 0};
    if (poll(&entry, 1, PollTimeoutMs(deadline)) < 0 && errno != EINTR) {
      return OsError(errno, "poll");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> Listen(const std::string& host, uint32_t backlog,
                                uint16_t* port) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), "0", &hints, &found);
  if (error == EAI_SYSTEM) return OsError(errno, "getaddrinfo");
  if (error != 0) {
    return absl::NotFoundError(
        absl::StrCat("host ", host, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found,
                                                                &freeaddrinfo);
  UniqueFd fd(
      socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.ok()) return OsError(errno, "socket");
  if (bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0) {
    return OsError(errno, absl::StrCat("bind(", host, ")"));
  }
  if (listen(fd.get(), static_cast<int>(backlog)) != 0) {
    return OsError(errno, absl::StrCat("listen(", host, ")"));
  }
  sockaddr_storage bound = {};
  socklen_t size = sizeof(bound);
  auto* address = reinterpret_cast<sockaddr*>(&bound);
  if (getsockname(fd.get(), address, &size) != 0) {
    return OsError(errno, "getsockname");
  }
  *port = ntohs(bound.ss_family == AF_INET6
                    ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                    : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return fd;
}

absl::Status WorldsDiffer(const RendezvousOptions& options, uint32_t rank,
                          uint32_t world_size) {
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " was told that there are ", world_size,
                   " ranks, this rank (", options.rank, ") that there are ",
                   options.world_size, ": give all ranks the same world_size"));
}

absl::StatusOr<UniqueFd> DialRank(const RendezvousOptions& options,
                                  const AddressRecord& record, uint32_t rank,
                                  absl::Time deadline) {
  const Endpoint endpoint = {.kind = Endpoint::Kind::kGrpcTcp,
                             .path = "",
                             .host = record.host,
                             .port = absl::StrCat(record.port)};
  OPTSTATE_ASSIGN_OR_RETURN(UniqueFd fd, Dial(endpoint, deadline));
  OPTSTATE_RETURN_IF_ERROR(Tune(fd.get()));
  Greeting::Bytes bytes = Encode(Greeting{.secret = record.knock,
                                          .rank = options.rank,
                                          .world_size = options.world_size});
  OPTSTATE_RETURN_IF_ERROR(
      Transfer(fd.get(), Direction::kSend, deadline, &bytes));
  OPTSTATE_RETURN_IF_ERROR(
      Transfer(fd.get(), Direction::kReceive, deadline, &bytes));
  OPTSTATE_ASSIGN_OR_RETURN(const Greeting greeting, DecodeGreeting(bytes));
  if (!AreEqual(greeting.secret, record.answer) || greeting.rank != rank) {
    return absl::UnavailableError(
        "another process listens there, which does not know the rank's "
        "secret: give the run a fresh name");
  }
  if (greeting.world_size != options.world_size) {
    return WorldsDiffer(options, rank, greeting.world_size);
  }
  return fd;
}

// Accepts the ranks above this one.
class Acceptor {
 public:
  Acceptor(const RendezvousOptions& options, const AddressRecord& record,
           int listener, std::vector<UniqueFd>* sockets)
      : options_(options),
        record_(record),
        listener_(listener),
        sockets_(*sockets) {}

  absl::Status AcceptAll(absl::Time deadline) {
    while (CountMissing() > 0) {
      if (absl::Now() >= deadline) return Missing();
      polls_.clear();
      polls_.push_back({.fd = listener_, .events = POLLIN, .revents = 0});
      for (const Stranger& each : strangers_) {
        polls_.push_back(
            {.fd = each.socket.get(), .events = POLLIN, .revents = 0});
      }
      const int count =
          poll(polls_.data(), polls_.size(), PollTimeoutMs(deadline));
      if (count < 0 && errno != EINTR) return OsError(errno, "poll");
      if (count <= 0) continue;
      OPTSTATE_RETURN_IF_ERROR(HearStrangers());
      if (polls_[0].revents != 0) OPTSTATE_RETURN_IF_ERROR(AcceptOne());
    }
    return absl::OkStatus();
  }

 private:
  // A connection that has not said who it is.
  struct Stranger {
    UniqueFd socket;
    Greeting::Bytes bytes = {};
    size_t received = 0;
  };

  uint32_t CountMissing() const {
    uint32_t missing = 0;
    for (uint32_t rank = options_.rank + 1; rank < sockets_.size(); ++rank) {
      missing += sockets_[rank].ok() ? 0 : 1;
    }
    return missing;
  }

  absl::Status Missing() const {
    std::string ranks;
    for (uint32_t rank = options_.rank + 1; rank < sockets_.size(); ++rank) {
      if (sockets_[rank].ok()) continue;
      absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", rank);
    }
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", options_.rank, " has waited for ranks ", ranks,
                     ", which have not connected in time"));
  }

  absl::Status AcceptOne() {
    UniqueFd socket(
        accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.ok()) {
      // Errors of the connection that was to be accepted.
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED ||
          errno == EPROTO) {
        return absl::OkStatus();
      }
      return OsError(errno, "accept4");
    }
    OPTSTATE_RETURN_IF_ERROR(Tune(socket.get()));
    // Hundreds of ranks may have connected before the first is heard.
    if (strangers_.size() >= kStrangersMax + CountMissing()) {
      strangers_.erase(strangers_.begin());
    }
    strangers_.push_back(
        {.socket = std::move(socket), .bytes = {}, .received = 0});
    return absl::OkStatus();
  }

  // polls_[i + 1] is of strangers_[i].
  absl::Status HearStrangers() {
    for (size_t i = 0; i < strangers_.size(); ++i) {
      if (polls_[i + 1].revents == 0) continue;
      OPTSTATE_RETURN_IF_ERROR(Hear(&strangers_[i]));
    }
    strangers_.erase(
        std::remove_if(strangers_.begin(), strangers_.end(),
                       [](const Stranger& each) { return !each.socket.ok(); }),
        strangers_.end());
    return absl::OkStatus();
  }

  absl::Status Hear(Stranger* stranger) {
    const ssize_t count = recv(
        stranger->socket.get(), stranger->bytes.data() + stranger->received,
        stranger->bytes.size() - stranger->received, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      return absl::OkStatus();
    }
    if (count <= 0) {
      stranger->socket.reset();
      return absl::OkStatus();
    }
    stranger->received += static_cast<size_t>(count);
    if (stranger->received < stranger->bytes.size()) return absl::OkStatus();
    const absl::StatusOr<Greeting> greeting = DecodeGreeting(stranger->bytes);
    if (!greeting.ok() || !AreEqual(greeting->secret, record_.knock)) {
      stranger->socket.reset();
      return absl::OkStatus();
    }
    return Admit(*greeting, std::move(stranger->socket));
  }

  // The caller knows the secret: it is a rank of this run.
  absl::Status Admit(const Greeting& greeting, UniqueFd socket) {
    Greeting::Bytes answer =
        Encode(Greeting{.secret = record_.answer,
                        .rank = options_.rank,
                        .world_size = options_.world_size});
    // The socket's buffer is empty. A rank that is told another world size
    // finds it in this answer.
    const ssize_t sent =
        send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    if (greeting.world_size != options_.world_size) {
      return WorldsDiffer(options_, greeting.rank, greeting.world_size);
    }
    if (greeting.rank <= options_.rank || greeting.rank >= sockets_.size() ||
        sockets_[greeting.rank].ok()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "a process says that it is rank ", greeting.rank,
          ", which another one is: give each process a rank of its own"));
    }
    // Without its answer the rank gives up, and so does this one when it has
    // waited for it.
    if (sent == static_cast<ssize_t>(answer.size())) {
      sockets_[greeting.rank] = std::move(socket);
    }
    return absl::OkStatus();
  }

  const RendezvousOptions& options_;
  const AddressRecord& record_;
  const int listener_;
  std::vector<UniqueFd>& sockets_;
  std::vector<Stranger> strangers_;
  std::vector<pollfd> polls_;
};

absl::Status CheckOptions(const RendezvousOptions& options) {
  if (options.world_size == 0 || options.rank >= options.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", options.rank, " of ", options.world_size, " ranks"));
  }
  if (options.name.empty()) {
    return absl::InvalidArgumentError("the name of the run is empty");
  }
  if (options.host.empty() || absl::StrContains(options.host, ' ')) {
    return absl::InvalidArgumentError(
        absl::StrCat("host \"", options.host, "\" is no name and no address"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<UniqueFd>> ConnectRanks(
    const RendezvousOptions& options, Store* store, absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(CheckOptions(options));
  std::vector<UniqueFd> sockets(options.world_size);
  if (options.world_size == 1) return sockets;
  AddressRecord mine;
  mine.world_size = options.world_size;
  mine.host = options.host;
  OPTSTATE_RETURN_IF_ERROR(DrawSecret(&mine.knock));
  OPTSTATE_RETURN_IF_ERROR(DrawSecret(&mine.answer));
  OPTSTATE_ASSIGN_OR_RETURN(
      const UniqueFd listener,
      Listen(options.bind_host.empty() ? options.host : options.bind_host,
             options.world_size + kStrangersMax, &mine.port));
  OPTSTATE_RETURN_IF_ERROR(
      store->Set(KeyOf(options, options.rank), mine.ToString()));
  for (uint32_t rank = 0; rank < options.rank; ++rank) {
    OPTSTATE_ASSIGN_OR_RETURN(const std::string text,
                              store->Get(KeyOf(options, rank), deadline));
    const std::string of_rank = absl::StrCat("the address of rank ", rank);
    const absl::StatusOr<AddressRecord> record = ParseAddressRecord(text);
    if (!record.ok()) return Annotate(record.status(), of_rank);
    if (record->world_size != options.world_size) {
      return WorldsDiffer(options, rank, record->world_size);
    }
    absl::StatusOr<UniqueFd> socket =
        DialRank(options, *record, rank, deadline);
    if (!socket.ok()) {
      return Annotate(
          socket.status(),
          absl::StrCat("rank ", rank, " at ", record->host, ":", record->port));
    }
    sockets[rank] = *std::move(socket);
  }
  OPTSTATE_RETURN_IF_ERROR(
      Acceptor(options, mine, listener.get(), &sockets).AcceptAll(deadline));
  return sockets;
}

}  // namespace optstate::client
