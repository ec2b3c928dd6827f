// A minimal engine for tests of the supervisor: it answers every connection
// with a HelloReply whose engine_instance is its pid, and keeps it open until
// the peer closes. What else it does, the job's name says:
//
//   dies-at-start     exits with status 3
//   dies-on-hello...  kills itself when it gets a connection
//   never-ready...    never says that it is
//   one-session...    its job is over when a connection ends
//   deaf...           does not read its control socket once it is ready
//   stubborn...       outlives its supervisor by ignoring the closed socket
//
// It is no measure of what an engine should do: use it where the engine's own
// behaviour does not matter.

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "optstate/v1/engine.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/unique_fd.h"

namespace optstate::supervisor {
namespace {

constexpr int kConfigFd = 3;
constexpr int kControlFd = 4;

void Say(const v1::EngineEvent& event) {
  const std::string packet = event.SerializeAsString();
  (void)!::send(kControlFd, packet.data(), packet.size(), MSG_NOSIGNAL);
}

// -1: the supervisor is gone.
int ReceiveConnection() {
  char packet[1 << 17];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{packet, sizeof(packet)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(kControlFd, &message, MSG_CMSG_CLOEXEC) <= 0) return -1;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
  return fd;
}

void Answer(int fd) {
  v1::HelloReply reply;
  reply.mutable_status();
  reply.set_protocol_version(shm::kProtocolVersion);
  reply.set_engine_instance(static_cast<uint64_t>(::getpid()));
  (void)shm::SendFrame(fd, reply.SerializeAsString(), {},
                       absl::Now() + absl::Seconds(30));
}

class Engine {
 public:
  explicit Engine(std::string job) : job_(std::move(job)) {}

  void Run() {
    while (true) {
      std::vector<pollfd> fds = {{kControlFd, POLLIN, 0}};
      for (const UniqueFd& fd : connections_) fds.push_back({fd.get(), 0, 0});
      if (Is("deaf")) fds[0].events = 0;
      ::poll(fds.data(), fds.size(), -1);
      for (size_t i = fds.size() - 1; i > 0; --i) {
        if (fds[i].revents != 0) Close(i - 1);
      }
      if ((fds[0].revents & POLLIN) != 0 && !Take()) return;
      if ((fds[0].revents & POLLHUP) != 0) return;
    }
  }

  bool Is(absl::string_view prefix) const {
    return absl::StartsWith(job_, prefix);
  }

 private:
  bool Take() {
    UniqueFd fd(ReceiveConnection());
    if (!fd.ok()) return false;
    if (Is("dies-on-hello")) ::kill(::getpid(), SIGKILL);
    Answer(fd.get());
    connections_.push_back(std::move(fd));
    return true;
  }

  void Close(size_t index) {
    connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(index));
    if (!Is("one-session")) return;
    v1::EngineEvent event;
    event.mutable_finished();
    Say(event);
  }

  const std::string job_;
  std::vector<UniqueFd> connections_;
};

int RunFakeEngine() {
  v1::EngineConfig config;
  if (!config.ParseFromFileDescriptor(kConfigFd)) return 2;
  Engine engine(config.job());
  if (engine.Is("dies-at-start")) return 3;
  if (!engine.Is("never-ready")) {
    v1::EngineEvent event;
    event.mutable_ready();
    Say(event);
  }
  engine.Run();
  if (engine.Is("stubborn")) ::pause();
  return 0;
}

}  // namespace
}  // namespace optstate::supervisor

int main() { return optstate::supervisor::RunFakeEngine(); }
