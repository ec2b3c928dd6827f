#include "server/supervisor/engine_process.h"

#include <linux/sockios.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/partition.h"
#include "proto/types/status_macros.h"
#include "server/config/own_flags.h"
#include "server/engine/versions.h"
#include "server/os/process_stat.h"
#include "server/os/spawn.h"

namespace optstate::supervisor {
namespace {

constexpr absl::Duration kExitPoll = absl::Milliseconds(50);
// Time from the end of the engine's connection to its exit.
constexpr absl::Duration kEndTimeout = absl::Seconds(20);

absl::StatusOr<std::pair<UniqueFd, UniqueFd>> StreamPair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0,
                   fds) != 0) {
    return OsError(errno, "socketpair");
  }
  return std::make_pair(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

// Writes the configuration to a memfd rather than an argument: other users can
// read a command line.
absl::StatusOr<UniqueFd> ConfigFile(const v1::EngineConfig& config) {
  UniqueFd fd(::memfd_create("optstate-engine-config", MFD_CLOEXEC));
  if (!fd.ok()) return OsError(errno, "memfd_create");
  const std::string bytes = config.SerializeAsString();
  if (::pwrite(fd.get(), bytes.data(), bytes.size(), 0) !=
      static_cast<ssize_t>(bytes.size())) {
    return OsError(errno, "write the engine's configuration");
  }
  return fd;
}

std::vector<std::string> Arguments(const std::string& job) {
  return {"optstated",
          config::kEngineFlag,
          job,
          config::kEngineConfigFdFlag,
          absl::StrCat(os::kFirstInheritedFd),
          config::kEngineSocketFdFlag,
          absl::StrCat(os::kFirstInheritedFd + 1)};
}

absl::Status Dying() {
  return absl::UnavailableError("the engine takes no connections any more");
}

// Calls pidfd_open by syscall: glibc 2.36 declares these functions without
// extern "C".
UniqueFd OpenPidFd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

std::string Describe(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) {
    return absl::StrCat("exited with status ", info.si_status);
  }
  const char* name = ::strsignal(info.si_status);
  return absl::StrCat(
      "was killed by signal ", info.si_status, " (",
      name == nullptr ? "unknown" : name, ")",
      info.si_status == SIGKILL ? ", perhaps for memory: see dmesg" : "");
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineProcess>> EngineProcess::AdoptRunning(
    os::EventLoop* loop, const std::string& job_directory,
    const Introduction& introduction, Callbacks callbacks) {
  std::unique_ptr<EngineProcess> engine(
      new EngineProcess(loop, std::move(callbacks)));
  OPTSTATE_ASSIGN_OR_RETURN(engine->control_,
                            engine::ConnectToEngine(job_directory));
  const pid_t pid = engine::PeerPid(engine->control_.get());
  // If the pid is this process's, or that of a process that is gone, the engine
  // was started a moment ago and has not taken over its socket. Then its first
  // packet identifies it.
  if (pid != 0 && pid != ::getpid() && ::kill(pid, 0) == 0) {
    OPTSTATE_RETURN_IF_ERROR(engine->Identify(pid));
  }
  OPTSTATE_RETURN_IF_ERROR(engine->Introduce(introduction));
  return engine;
}

absl::StatusOr<std::unique_ptr<EngineProcess>> EngineProcess::Start(
    os::EventLoop* loop, const std::string& executable,
    const v1::EngineConfig& config, const Introduction& introduction,
    Callbacks callbacks) {
  OPTSTATE_ASSIGN_OR_RETURN(const UniqueFd config_file, ConfigFile(config));
  OPTSTATE_ASSIGN_OR_RETURN(const UniqueFd listener,
                            engine::ListenForSupervisor(config.job_dir()));
  std::unique_ptr<EngineProcess> engine(
      new EngineProcess(loop, std::move(callbacks)));
  // The connection is made before the engine: an engine that is to end with its
  // supervisor finds this connection's end even when the supervisor is killed
  // right now.
  OPTSTATE_ASSIGN_OR_RETURN(engine->control_,
                            engine::ConnectToEngine(config.job_dir()));
  const std::array<int, 2> fds = {config_file.get(), listener.get()};
  OPTSTATE_ASSIGN_OR_RETURN(
      const pid_t pid, os::Spawn(executable, Arguments(config.job()), fds));
  engine->callbacks_.on_started(pid);
  absl::Status status = engine->Identify(pid);
  if (status.ok()) status = engine->Introduce(introduction);
  if (!status.ok()) {
    engine->KillAndReap();
    return status;
  }
  return engine;
}

EngineProcess::EngineProcess(os::EventLoop* loop, Callbacks callbacks)
    : loop_(loop), callbacks_(std::move(callbacks)) {}

EngineProcess::~EngineProcess() {
  *alive_ = false;
  CloseControl();
  loop_->Cancel(exit_poll_);
  loop_->Cancel(end_timer_);
  if (pidfd_.ok()) loop_->Unwatch(pidfd_.get());
}

absl::Status EngineProcess::Introduce(const Introduction& introduction) {
  OPTSTATE_ASSIGN_OR_RETURN(auto grpc, StreamPair());
  grpc_ = std::move(grpc.first);
  OPTSTATE_RETURN_IF_ERROR(
      loop_->Watch(control_.get(), EPOLLIN,
                   [this](uint32_t events) { OnControlEvents(events); }));
  v1::SupervisorRequest request;
  *request.mutable_supervise() = introduction.supervise;
  request.mutable_supervise()->set_control_version(engine::kControlVersion);
  if (request.ByteSizeLong() > engine::kPacketBytesMax) {
    spdlog::warn(
        "engine {}: the quotas that may concern its job are {} bytes, more "
        "than a packet has room for: it goes by those that it was started with",
        pid_, request.ByteSizeLong());
    request.mutable_supervise()->clear_quotas();
  }
  Enqueue(request, std::make_shared<const UniqueFd>(std::move(grpc.second)));
  for (const auto& [rank, kept] : introduction.kept) {
    *request.mutable_kept_gradients() = kept.info;
    Enqueue(request, kept.segment);
  }
  request.mutable_start_job();
  Enqueue(request);
  return absl::OkStatus();
}

void EngineProcess::Enqueue(const v1::SupervisorRequest& request,
                            std::shared_ptr<const UniqueFd> fd) {
  if (!control_.ok()) return;
  outgoing_.push_back({request.SerializeAsString(), std::move(fd)});
  Flush();
}

void EngineProcess::Flush() {
  while (!outgoing_.empty()) {
    const Outgoing& next = outgoing_.front();
    const int error = engine::SendPacket(
        control_.get(), next.bytes, next.fd == nullptr ? -1 : next.fd->get());
    // ETOOMANYREFS: too many fds of this process are in flight.
    if (error == EAGAIN || error == ETOOMANYREFS) {
      loop_->SetEvents(control_.get(), EPOLLIN | EPOLLOUT);
      return;
    }
    // The connection's end is handled where it is read.
    if (error != 0 && error != EPIPE && error != ECONNRESET) {
      spdlog::error("engine {}: {}", pid_,
                    OsError(error, "send a request to it").ToString());
    }
    outgoing_.pop_front();
  }
}

absl::Status EngineProcess::Identify(pid_t pid) {
  if (pidfd_.ok()) loop_->Unwatch(pidfd_.get());
  loop_->Cancel(exit_poll_);
  pid_ = pid;
  pidfd_ = OpenPidFd(pid);
  if (pidfd_.ok()) {
    // pidfd_open sets close-on-exec by itself.
    return loop_->Watch(pidfd_.get(), EPOLLIN, [this](uint32_t) { OnExit(); });
  }
  spdlog::debug("pidfd_open is refused ({}), looking at engine {} every {} ms",
                std::strerror(errno), pid_,
                absl::ToInt64Milliseconds(kExitPoll));
  // The first poll is delayed: the caller is not ready for on_exit yet.
  exit_poll_ = loop_->RunAfter(kExitPoll, [this] { PollExit(); });
  return absl::OkStatus();
}

bool EngineProcess::HasExited() const {
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info,
               WEXITED | WNOHANG | WNOWAIT) == 0) {
    return info.si_pid != 0;
  }
  return ::kill(pid_, 0) != 0 && errno == ESRCH;  // not a child of this process
}

void EngineProcess::PollExit() {
  if (HasExited()) return OnExit();
  exit_poll_ = loop_->RunAfter(kExitPoll, [this] { PollExit(); });
}

void EngineProcess::OnExit() {
  siginfo_t info{};
  std::string how =
      "has ended; it was started by another supervisor, so that nobody here "
      "was told how: see dmesg";
  if (exited_) return;
  if (pid_ != 0 &&
      ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG) == 0) {
    if (info.si_pid == 0) return;
    how = Describe(info);
  }
  // The engine's last messages still count: it may have finished before its
  // exit.
  const std::shared_ptr<bool> alive = alive_;
  exited_ = true;
  if (pidfd_.ok()) loop_->Unwatch(pidfd_.get());
  pidfd_.reset();
  loop_->Cancel(exit_poll_);
  while (*alive && control_.ok() && ReadEvent()) {
  }
  if (!*alive) return;
  CloseControl();
  if (!cannot_start_.empty()) absl::StrAppend(&how, ": ", cannot_start_);
  const auto on_exit = callbacks_.on_exit;
  on_exit(how);
}

void EngineProcess::OnControlEvents(uint32_t events) {
  const std::shared_ptr<bool> alive = alive_;
  if ((events & EPOLLOUT) != 0) {
    loop_->SetEvents(control_.get(), EPOLLIN);
    Flush();
    if (outgoing_.empty()) callbacks_.on_writable();
  }
  while (*alive && control_.ok() && ReadEvent()) {
  }
  if (*alive && !control_.ok()) OnConnectionEnd();
}

bool EngineProcess::ReadEvent() {
  absl::StatusOr<std::optional<engine::Packet>> packet =
      engine::ReceivePacket(control_.get());
  if (absl::IsInvalidArgument(packet.status())) {
    spdlog::error("engine {}: event refused: {}", pid_,
                  packet.status().ToString());
    return true;
  }
  if (!packet.ok()) {
    CloseControl();
    return false;
  }
  if (!packet->has_value()) return false;
  HandlePacket(**std::move(packet));
  return true;
}

// Handles the connection's end: usually the engine is exiting, and its exit
// status will say more.
void EngineProcess::OnConnectionEnd() {
  if (pid_ == 0) return OnExit();
  end_timer_ = loop_->RunAfter(kEndTimeout, [this] {
    spdlog::error("engine {} closed its connection and goes on: killing it",
                  pid_);
    Kill();
  });
}

void EngineProcess::HandlePacket(engine::Packet packet) {
  if (pid_ == 0 && packet.sender != 0) {
    const absl::Status status = Identify(packet.sender);
    if (!status.ok()) spdlog::error("{}", status.ToString());
  }
  v1::EngineEvent event;
  if (!event.ParseFromString(packet.bytes)) {
    spdlog::error("engine {} sent a malformed event", pid_);
    return;
  }
  switch (event.event_case()) {
    case v1::EngineEvent::kReady:
      return callbacks_.on_ready(event.ready());
    case v1::EngineEvent::kFinished:
      return callbacks_.on_finished();
    case v1::EngineEvent::kKeepGradients:
      if (!packet.fd.ok() || event.keep_gradients().rank() >= kWorldSizeMax) {
        spdlog::error("engine {}: gradients of rank {} cannot be kept", pid_,
                      event.keep_gradients().rank());
        return;
      }
      return callbacks_.on_keep(
          {event.keep_gradients(),
           std::make_shared<const UniqueFd>(std::move(packet.fd))});
    case v1::EngineEvent::kDropGradients:
      return callbacks_.on_drop(event.drop_gradients().rank());
    case v1::EngineEvent::kCannotStart:
      cannot_start_ = event.cannot_start().reason();
      return;
    case v1::EngineEvent::kWorking:
      return callbacks_.on_working(event.working().disk_bytes());
    case v1::EngineEvent::kRankLost:
      return callbacks_.on_rank_lost(event.rank_lost());
    case v1::EngineEvent::EVENT_NOT_SET:
      spdlog::error("engine {} sent an event that is not known here", pid_);
      return;
  }
}

absl::Status EngineProcess::Adopt(const v1::AdoptConnection& connection,
                                  int fd) {
  // A client whose session ended with the engine can be back before the
  // engine's exit is known here.
  const auto stat = os::ReadProcessStat(pid_);
  if (!control_.ok() || (stat.ok() && stat->is_exiting)) return Dying();
  if (!outgoing_.empty()) {
    return absl::UnavailableError("the engine takes no connections just now");
  }
  v1::SupervisorRequest request;
  *request.mutable_adopt_connection() = connection;
  const int error =
      engine::SendPacket(control_.get(), request.SerializeAsString(), fd);
  switch (error) {
    case 0:
      return absl::OkStatus();
    case EPIPE:
    case ECONNRESET:
      return Dying();
    case EAGAIN:
    case ETOOMANYREFS:
      loop_->SetEvents(control_.get(), EPOLLIN | EPOLLOUT);
      return absl::UnavailableError("the engine takes no connections just now");
    default:
      return OsError(error, "hand a connection to the engine");
  }
}

bool EngineProcess::HasUnreadPackets() const {
  int unread = 0;
  // SIOCOUTQ counts bytes that the peer has not read; the engine has a packet's
  // fds before the packet stops counting.
  return control_.ok() && ::ioctl(control_.get(), SIOCOUTQ, &unread) == 0 &&
         unread > 0;
}

void EngineProcess::Stop() {
  v1::SupervisorRequest request;
  request.mutable_stop();
  Enqueue(request);
}

void EngineProcess::SetDraining(bool draining) {
  v1::SupervisorRequest request;
  request.mutable_drain()->set_draining(draining);
  Enqueue(request);
}

void EngineProcess::CloseControl() {
  outgoing_.clear();
  if (!control_.ok()) return;
  loop_->Unwatch(control_.get());
  control_.reset();
}

void EngineProcess::Kill() {
  if (exited_) return;
  if (pidfd_.ok()) {
    (void)::syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0);
  } else if (pid_ != 0) {
    ::kill(pid_, SIGKILL);
  } else {
    // The listening process is unknown, and is not the engine that answers
    // here.
    CloseControl();
    OnConnectionEnd();
  }
}

void EngineProcess::KillAndReap() {
  Kill();
  siginfo_t info{};
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED) != 0 &&
         errno == EINTR) {
  }
}

}  // namespace optstate::supervisor
