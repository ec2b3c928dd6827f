// A minimal engine for tests of the supervisor: it answers every connection
// with a HelloReply whose engine_instance is its pid and whose server_version
// lists the gradients that it was given (see Describe), and keeps it open until
// the peer closes. The job's name selects further behaviour:
//
//   dies-at-start     exits with status 3
//   gives-up...       says that it cannot start and exits with status 3
//   dies-on-hello...  kills itself when it gets a connection
//   broken...         exits with status 3 while JOB_DIR/fixed is not there
//   never-ready...    never says that it is
//   works...          says that it works, 20 times at intervals of 100 ms, and
//                     then that it is ready
//   stuck...          says at such intervals, for ever, that it has not come on
//   ends-slowly...    once it is told to stop, works as long as that, makes
//                     JOB_DIR/ended, and ends
//   one-session...    its job is over when a connection ends
//   deaf...           does not read its control socket once it is ready
//   hangs-up...       closes every connection once it has answered it
//   stubborn...       does not end when it is told to
//   foreign...        speaks another control version while JOB_DIR/fixed is not
//                     there
//   keeps...          keeps gradients of rank N with the Nth connection (from
//                     0) and drops them with its end
//   loses...          does as keeps, and says before the drop that rank N is
//                     lost
//
// It does not define correct engine behaviour: use it only where the engine's
// own behaviour does not matter.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "optstate/v1/engine.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/unique_fd.h"
#include "server/engine/control_socket.h"
#include "server/engine/versions.h"
#include "server/os/executable.h"

namespace optstate::supervisor {
namespace {

constexpr int kConfigFd = 3;
constexpr int kListenerFd = 4;

// Returns "RANK INSTANCE OFFSET TEXT;".
std::string Describe(const v1::KeptGradientsInfo& info, int segment) {
  char text[64] = {};
  if (::pread(segment, text, sizeof(text) - 1, 0) < 0) text[0] = '?';
  return absl::StrCat(info.rank(), " ", info.client_instance(), " ",
                      info.gradient_offset_bytes(), " ", text, ";");
}

class Engine {
 public:
  explicit Engine(v1::EngineConfig config) : config_(std::move(config)) {}

  bool Is(absl::string_view prefix) const {
    return absl::StartsWith(config_.job(), prefix);
  }

  bool KeepsGradients() const { return Is("keeps") || Is("loses"); }

  bool IsFixed() const {
    return ::access((config_.job_dir() + "/fixed").c_str(), F_OK) == 0;
  }

  void Run() {
    if (!engine::TakeListenerOver(kListenerFd).ok()) return;
    while (!stopped_) {
      std::vector<pollfd> fds = {{kListenerFd, POLLIN, 0},
                                 {supervisor_.get(), POLLIN, 0}};
      for (const Connection& one : connections_) {
        fds.push_back({one.fd.get(), 0, 0});
      }
      if (Is("deaf") && started_) fds[1].events = 0;
      ::poll(fds.data(), fds.size(), -1);
      for (size_t i = fds.size() - 1; i > 1; --i) {
        if (fds[i].revents != 0) Close(i - 2);
      }
      if (fds[0].revents != 0) AcceptSupervisor();
      if (fds[1].revents != 0) TakeRequest();
    }
  }

 private:
  struct Connection {
    UniqueFd fd;
    uint32_t rank = 0;
  };

  void Say(const v1::EngineEvent& event, int fd = -1) {
    (void)engine::SendPacket(supervisor_.get(), event.SerializeAsString(), fd);
  }

  void AcceptSupervisor() {
    auto supervisor = engine::AcceptSupervisor(kListenerFd);
    if (supervisor.ok()) supervisor_ = *std::move(supervisor);
  }

  void TakeRequest() {
    auto packet = engine::ReceivePacket(supervisor_.get());
    if (!packet.ok()) {
      supervisor_.reset();
      stopped_ = config_.exit_with_supervisor();
      return;
    }
    if (!packet->has_value()) return;
    v1::SupervisorRequest request;
    if (!request.ParseFromString((*packet)->bytes)) return;
    UniqueFd fd = std::move((*packet)->fd);
    if (request.has_supervise() && started_) SayEverything();
    if (request.has_kept_gradients()) {
      given_ += Describe(request.kept_gradients(), fd.get());
    }
    if (request.has_start_job() && Is("gives-up")) GiveUp();
    if (request.has_start_job() && Is("works")) Work();
    while (request.has_start_job() && Is("stuck")) SayWorking(1);
    if (request.has_start_job() && !std::exchange(started_, true)) {
      SayEverything();
    }
    if (request.has_adopt_connection()) Take(std::move(fd));
    if (request.has_stop() && Is("ends-slowly")) EndSlowly();
    if (request.has_stop() && !Is("stubborn")) stopped_ = true;
  }

  // Works for a tenth of the time that the tests allow, and says so. It waits
  // for nobody: the time that the work takes is what they are about.
  void SayWorking(uint64_t disk_bytes) {
    v1::EngineEvent event;
    event.mutable_working()->set_disk_bytes(disk_bytes);
    Say(event);
    absl::SleepFor(absl::Milliseconds(100));
  }

  void Work() {
    for (uint64_t bytes = 1; bytes <= 20; ++bytes) SayWorking(bytes << 30);
  }

  void EndSlowly() {
    Work();
    ::close(::creat((config_.job_dir() + "/ended").c_str(), 0600));
  }

  void SayEverything() {
    if (KeepsGradients()) {
      for (const Connection& one : connections_) Keep(one.rank);
    }
    if (Is("never-ready")) return;
    v1::EngineEvent event;
    v1::EngineEvent::Ready& ready = *event.mutable_ready();
    ready.set_version("fake");
    const bool foreign = Is("foreign") && !IsFixed();
    ready.set_control_version(engine::kControlVersion + (foreign ? 1 : 0));
    ready.set_restarts(config_.restarts());
    ready.set_executable(*os::ExecutableIdentity("/proc/self/exe"));
    Say(event);
  }

  [[noreturn]] void GiveUp() {
    v1::EngineEvent event;
    event.mutable_cannot_start()->set_reason("somebody has the lock");
    Say(event);
    std::_Exit(3);
  }

  void Take(UniqueFd fd) {
    if (Is("dies-on-hello")) ::kill(::getpid(), SIGKILL);
    connections_.push_back({std::move(fd), next_rank_++});
    if (KeepsGradients()) Keep(connections_.back().rank);
    v1::HelloReply reply;
    reply.mutable_status();
    reply.set_protocol_version(shm::kProtocolVersion);
    reply.set_server_version(given_);
    reply.set_engine_instance(static_cast<uint64_t>(::getpid()));
    (void)shm::SendFrame(connections_.back().fd.get(),
                         reply.SerializeAsString(), {},
                         absl::Now() + absl::Seconds(30));
    if (Is("hangs-up")) connections_.pop_back();
  }

  void Keep(uint32_t rank) {
    const UniqueFd segment(::memfd_create("gradients", MFD_CLOEXEC));
    const std::string text = absl::StrCat("of rank ", rank);
    if (::write(segment.get(), text.data(), text.size()) < 0) return;
    v1::EngineEvent event;
    v1::KeptGradientsInfo& info = *event.mutable_keep_gradients();
    info.set_rank(rank);
    info.set_client_instance(100 + rank);
    info.set_gradient_offset_bytes(4096);
    Say(event, segment.get());
  }

  void Close(size_t index) {
    const uint32_t rank = connections_[index].rank;
    connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(index));
    v1::EngineEvent event;
    if (Is("loses")) {
      event.mutable_rank_lost()->set_rank(rank);
      event.mutable_rank_lost()->set_committed_step(7);
      event.mutable_rank_lost()->set_reason("process 4711 ended");
      Say(event);
    }
    if (KeepsGradients()) {
      event.mutable_drop_gradients()->set_rank(rank);
      Say(event);
    }
    if (!Is("one-session")) return;
    event.mutable_finished();
    Say(event);
  }

  const v1::EngineConfig config_;
  UniqueFd supervisor_;
  bool started_ = false;
  bool stopped_ = false;
  std::string given_;
  std::vector<Connection> connections_;
  uint32_t next_rank_ = 0;
};

int RunFakeEngine() {
  v1::EngineConfig config;
  if (!config.ParseFromFileDescriptor(kConfigFd)) return 2;
  Engine engine(std::move(config));
  if (engine.Is("dies-at-start")) return 3;
  if (engine.Is("broken") && !engine.IsFixed()) return 3;
  engine.Run();
  return 0;
}

}  // namespace
}  // namespace optstate::supervisor

int main() { return optstate::supervisor::RunFakeEngine(); }
