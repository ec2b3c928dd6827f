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
#include "proto/types/status_macros.h"
#include "server/supervisor/process_state.h"
#include "server/supervisor/spawn.h"

namespace optstate::supervisor {
namespace {

constexpr absl::Duration kExitPoll = absl::Milliseconds(50);
constexpr size_t kEventBytesMax = 4096;

absl::StatusOr<std::pair<UniqueFd, UniqueFd>> SocketPair(int type) {
  int fds[2];
  if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, fds) != 0) {
    return OsError(errno, "socketpair");
  }
  return std::make_pair(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

// In a memfd rather than an argument: other users can read a command line.
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
          EngineCommandLine::kJobFlag,
          job,
          EngineCommandLine::kConfigFdFlag,
          absl::StrCat(kFirstInheritedFd),
          EngineCommandLine::kControlFdFlag,
          absl::StrCat(kFirstInheritedFd + 1),
          EngineCommandLine::kGrpcFdFlag,
          absl::StrCat(kFirstInheritedFd + 2)};
}

// 0 or an errno.
int SendWithFd(int socket, const std::string& payload, int fd) {
  iovec data{const_cast<char*>(payload.data()), payload.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0 ? 0
                                                                       : errno;
}

absl::Status Dying() {
  return absl::UnavailableError("the engine takes no connections any more");
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

absl::StatusOr<std::unique_ptr<EngineProcess>> EngineProcess::Start(
    EventLoop* loop, const std::string& executable,
    const v1::EngineConfig& config, Callbacks callbacks) {
  // Blocking: the engine waits in recvmsg; we say MSG_DONTWAIT.
  OPTSTATE_ASSIGN_OR_RETURN(auto control, SocketPair(SOCK_SEQPACKET));
  OPTSTATE_ASSIGN_OR_RETURN(auto grpc, SocketPair(SOCK_STREAM | SOCK_NONBLOCK));
  OPTSTATE_ASSIGN_OR_RETURN(const UniqueFd config_file, ConfigFile(config));
  std::unique_ptr<EngineProcess> engine(
      new EngineProcess(loop, std::move(callbacks)));
  const std::array<int, 3> fds = {config_file.get(), control.second.get(),
                                  grpc.second.get()};
  OPTSTATE_ASSIGN_OR_RETURN(engine->pid_,
                            Spawn(executable, Arguments(config.job()), fds));
  engine->reaped_ = false;
  engine->control_ = std::move(control.first);
  engine->grpc_ = std::move(grpc.first);
  OPTSTATE_RETURN_IF_ERROR(engine->WatchControl());
  OPTSTATE_RETURN_IF_ERROR(engine->WatchExit());
  return engine;
}

EngineProcess::EngineProcess(EventLoop* loop, Callbacks callbacks)
    : loop_(loop), callbacks_(std::move(callbacks)) {}

EngineProcess::~EngineProcess() {
  *alive_ = false;
  Stop();
  loop_->Cancel(exit_poll_);
  if (pidfd_.ok()) loop_->Unwatch(pidfd_.get());
  if (reaped_) return;
  ::kill(pid_, SIGKILL);
  siginfo_t info{};
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED) != 0 &&
         errno == EINTR) {
  }
}

absl::Status EngineProcess::WatchControl() {
  return loop_->Watch(control_.get(), EPOLLIN,
                      [this](uint32_t events) { OnControlEvents(events); });
}

absl::Status EngineProcess::WatchExit() {
  // By syscall: glibc 2.36 declares pidfd_open without extern "C".
  pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  if (pidfd_.ok()) {
    // pidfd_open sets close-on-exec by itself.
    return loop_->Watch(pidfd_.get(), EPOLLIN, [this](uint32_t) { OnExit(); });
  }
  spdlog::debug("pidfd_open is refused ({}), looking at engine {} every {} ms",
                std::strerror(errno), pid_,
                absl::ToInt64Milliseconds(kExitPoll));
  PollExit();
  return absl::OkStatus();
}

void EngineProcess::PollExit() {
  siginfo_t info{};
  const int result = ::waitid(P_PID, static_cast<id_t>(pid_), &info,
                              WEXITED | WNOHANG | WNOWAIT);
  if (result == 0 && info.si_pid != 0) return OnExit();
  exit_poll_ = loop_->RunAfter(kExitPoll, [this] { PollExit(); });
}

void EngineProcess::OnExit() {
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG) != 0 ||
      info.si_pid == 0) {
    return;
  }
  // What it said last still counts: it may have finished before it went.
  const std::shared_ptr<bool> alive = alive_;
  reaped_ = true;
  if (pidfd_.ok()) loop_->Unwatch(pidfd_.get());
  pidfd_.reset();
  while (*alive && control_.ok() && ReadEvent()) {
  }
  if (!*alive) return;
  Stop();
  const auto on_exit = callbacks_.on_exit;
  on_exit(Describe(info));
}

void EngineProcess::OnControlEvents(uint32_t events) {
  const std::shared_ptr<bool> alive = alive_;
  if ((events & EPOLLOUT) != 0) {
    loop_->SetEvents(control_.get(), EPOLLIN);
    callbacks_.on_writable();
  }
  while (*alive && control_.ok() && ReadEvent()) {
  }
}

bool EngineProcess::ReadEvent() {
  char packet[kEventBytesMax];
  const ssize_t count =
      ::recv(control_.get(), packet, sizeof(packet), MSG_DONTWAIT);
  if (count > 0) {
    HandlePacket(absl::string_view(packet, static_cast<size_t>(count)));
    return true;
  }
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  // It closed the socket that it lives on: it is dying, or out of its mind.
  Stop();
  Kill();
  return false;
}

void EngineProcess::HandlePacket(absl::string_view packet) {
  v1::EngineEvent event;
  if (!event.ParseFromArray(packet.data(), static_cast<int>(packet.size()))) {
    spdlog::error("engine {} sent a malformed event", pid_);
    return;
  }
  const std::shared_ptr<bool> alive = alive_;
  if (event.has_ready()) callbacks_.on_ready();
  if (*alive && event.has_finished()) callbacks_.on_finished();
}

absl::Status EngineProcess::Adopt(const v1::AdoptConnection& connection,
                                  int fd) {
  // A client whose session ended with the engine can be back before we know.
  if (!control_.ok() || IsExiting(pid_)) return Dying();
  const int error =
      SendWithFd(control_.get(), connection.SerializeAsString(), fd);
  switch (error) {
    case 0:
      return absl::OkStatus();
    case EPIPE:
    case ECONNRESET:
      return Dying();
    case EAGAIN:
    case ETOOMANYREFS:  // too many fds of ours are on their way to others
      loop_->SetEvents(control_.get(), EPOLLIN | EPOLLOUT);
      return absl::UnavailableError("the engine takes no connections just now");
    default:
      return OsError(error, "hand a connection to the engine");
  }
}

bool EngineProcess::HasUnreadPackets() const {
  int unread = 0;
  // Counts what the peer has not read; the fds of a packet are the engine's
  // before the packet stops counting.
  return control_.ok() && ::ioctl(control_.get(), SIOCOUTQ, &unread) == 0 &&
         unread > 0;
}

void EngineProcess::Stop() {
  if (!control_.ok()) return;
  loop_->Unwatch(control_.get());
  control_.reset();
}

void EngineProcess::Kill() {
  if (!reaped_) ::kill(pid_, SIGKILL);
}

}  // namespace optstate::supervisor
