#include "server/testing/daemon_harness.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"
#include "server/os/private_directory.h"

namespace optstate::server {
namespace {

constexpr char kBinary[] = "server/optstated";

[[noreturn]] void Execute(std::vector<std::string> args,
                          const std::string& log_path) {
  const int log = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::dup2(log, STDOUT_FILENO);
  ::dup2(log, STDERR_FILENO);
  std::vector<char*> argv;
  argv.reserve(args.size() + 1);
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  ::execv(kBinary, argv.data());
  ::_exit(127);
}

// Kills engines whose daemon is gone; they have become children of this
// process.
void KillOrphans() {
  while (true) {
    std::ifstream children(
        absl::StrCat("/proc/self/task/", ::getpid(), "/children"));
    pid_t pid = 0;
    if (!(children >> pid)) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
}

}  // namespace

DaemonHarness::DaemonHarness() {
  // This process must wait for engines that outlive their supervisor.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  std::string name = "/tmp/optstated-XXXXXX";  // short, as socket paths are
  root_ = ::mkdtemp(name.data());
  state_ = root_ + "/state";
  socket_ = root_ + "/s.sock";
}

DaemonHarness::~DaemonHarness() {
  for (const pid_t pid : started_) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  KillOrphans();
  EXPECT_TRUE(os::RemoveTree(root_).ok());
}

pid_t DaemonHarness::Start(std::vector<std::string> args) {
  args.insert(args.begin(), kBinary);
  const pid_t pid = ::fork();
  if (pid == 0) Execute(std::move(args), root_ + "/log");
  started_.push_back(pid);
  return pid;
}

pid_t DaemonHarness::StartDaemon(const std::vector<std::string>& further) {
  std::vector<std::string> args = {"--state-dir", state_, "--socket", socket_};
  args.insert(args.end(), further.begin(), further.end());
  const pid_t pid = Start(std::move(args));
  EXPECT_TRUE(Eventually([this] { return Connect().ok(); })) << Log();
  return pid;
}

ProcessExit DaemonHarness::AwaitExit(pid_t pid) {
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  std::erase(started_, pid);
  return {WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status), Log()};
}

ProcessExit DaemonHarness::RunToEnd(std::vector<std::string> args) {
  return AwaitExit(Start(std::move(args)));
}

std::string DaemonHarness::Log() const {
  std::stringstream text;
  text << std::ifstream(root_ + "/log").rdbuf();
  return text.str();
}

UniqueFd DaemonHarness::Connect() const {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, socket_.c_str());
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                sizeof(address)) != 0) {
    fd.reset();
  }
  return fd;
}

absl::StatusOr<UniqueFd> DaemonHarness::Open(const std::string& job) const {
  UniqueFd fd = Connect();
  v1::Hello hello;
  hello.set_protocol_version_min(shm::kProtocolVersion);
  hello.set_protocol_version_max(shm::kProtocolVersion);
  hello.set_wire(v1::WIRE_SHM);
  hello.set_job(job);
  hello.set_pid(::getpid());
  const absl::Time deadline = absl::Now() + kPatience;
  OPTSTATE_RETURN_IF_ERROR(
      shm::SendFrame(fd.get(), hello.SerializeAsString(), {}, deadline));
  OPTSTATE_ASSIGN_OR_RETURN(
      const shm::Frame frame,
      shm::ReceiveFrame(fd.get(), shm::kHelloBytesMax, deadline));
  v1::HelloReply reply;
  EXPECT_TRUE(reply.ParseFromString(frame.payload));
  OPTSTATE_RETURN_IF_ERROR(FromProto(reply.status()));
  return fd;
}

bool DaemonHarness::Eventually(const std::function<bool()>& holds) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (!holds()) {
    if (absl::Now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

bool DaemonHarness::ClosedByPeer(int fd) {
  pollfd entry{fd, POLLRDHUP, 0};
  return ::poll(&entry, 1,
                static_cast<int>(absl::ToInt64Milliseconds(kPatience))) == 1;
}

bool DaemonHarness::Exists(const std::string& path) {
  return ::access(path.c_str(), F_OK) == 0;
}

}  // namespace optstate::server
