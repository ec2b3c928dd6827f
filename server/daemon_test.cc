// The real optstated as a process: its command line, start and end, and what
// only whole processes show. What the supervisor decides is tested beside it.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/unique_fd.h"
#include "server/supervisor/private_directory.h"

namespace optstate {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kProbeFlag[] = "--probe-as-other-user";
constexpr char kBinary[] = "server/optstated";
// Real time; a test that waits this long fails.
constexpr absl::Duration kPatience = absl::Seconds(60);

struct Exit {
  int code = -1;  // -signal when killed
  std::string output;
};

class DaemonTest : public testing::Test {
 protected:
  DaemonTest() {
    // Engines that outlive their supervisor are ours to wait for.
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    std::string name = "/tmp/optstated-XXXXXX";  // short, as socket paths are
    root_ = ::mkdtemp(name.data());
    state_ = root_ + "/state";
    socket_ = root_ + "/s.sock";
  }

  ~DaemonTest() override {
    for (const pid_t pid : started_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    while (::waitpid(-1, nullptr, 0) > 0) {
    }
    EXPECT_TRUE(supervisor::RemoveTree(root_).ok());
  }

  std::string LogPath() const { return root_ + "/log"; }

  std::string Log() const {
    std::stringstream text;
    text << std::ifstream(LogPath()).rdbuf();
    return text.str();
  }

  pid_t Start(std::vector<std::string> args) {
    args.insert(args.begin(), kBinary);
    const pid_t pid = ::fork();
    if (pid == 0) {
      const int log =
          ::open(LogPath().c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      ::dup2(log, STDOUT_FILENO);
      ::dup2(log, STDERR_FILENO);
      std::vector<char*> argv;
      for (std::string& arg : args) argv.push_back(arg.data());
      argv.push_back(nullptr);
      ::execv(kBinary, argv.data());
      ::_exit(127);
    }
    started_.push_back(pid);
    return pid;
  }

  pid_t StartDaemon(std::vector<std::string> further = {}) {
    std::vector<std::string> args = {"--state-dir", state_, "--socket",
                                     socket_};
    args.insert(args.end(), further.begin(), further.end());
    const pid_t pid = Start(std::move(args));
    EXPECT_TRUE(Eventually([this] { return Connect().ok(); })) << Log();
    return pid;
  }

  Exit AwaitExit(pid_t pid) {
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    std::erase(started_, pid);
    return {WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status),
            Log()};
  }

  Exit Run(std::vector<std::string> args) {
    return AwaitExit(Start(std::move(args)));
  }

  static bool Eventually(const std::function<bool()>& holds) {
    const absl::Time deadline = absl::Now() + kPatience;
    while (!holds()) {
      if (absl::Now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  UniqueFd Connect() const {
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

  absl::StatusOr<UniqueFd> Open(const std::string& job) const {
    UniqueFd fd = Connect();
    v1::Hello hello;
    hello.set_protocol_version_min(shm::kProtocolVersion);
    hello.set_protocol_version_max(shm::kProtocolVersion);
    hello.set_wire(v1::WIRE_SHM);
    hello.set_job(job);
    hello.set_pid(::getpid());
    const absl::Time deadline = absl::Now() + kPatience;
    absl::Status status =
        shm::SendFrame(fd.get(), hello.SerializeAsString(), {}, deadline);
    if (!status.ok()) return status;
    const auto frame =
        shm::ReceiveFrame(fd.get(), shm::kHelloBytesMax, deadline);
    if (!frame.ok()) return frame.status();
    v1::HelloReply reply;
    EXPECT_TRUE(reply.ParseFromString(frame->payload));
    status = FromProto(reply.status());
    if (!status.ok()) return status;
    return fd;
  }

  static bool ClosedByPeer(int fd) {
    pollfd entry{fd, POLLRDHUP, 0};
    return ::poll(&entry, 1,
                  static_cast<int>(absl::ToInt64Milliseconds(kPatience))) == 1;
  }

  std::unique_ptr<v1::Admin::Stub> Admin(std::string target = "") const {
    if (target.empty()) target = "unix:" + socket_;
    return v1::Admin::NewStub(
        grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  }

  v1::Job GetJob(const std::string& name) const {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_name(name);
    v1::Job job;
    const grpc::Status status = Admin()->GetJob(&context, request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }

  bool Exists(const std::string& path) const {
    return ::access(path.c_str(), F_OK) == 0;
  }

  std::string root_;
  std::string state_;
  std::string socket_;
  std::vector<pid_t> started_;
};

TEST_F(DaemonTest, CommandLine) {
  EXPECT_THAT(Run({"--version"}).output, HasSubstr("optstated 0."));
  EXPECT_THAT(Run({"--help"}).output,
              AllOf(HasSubstr("--check-config"), HasSubstr("SIGTERM")));
  EXPECT_NE(Run({"--no-such-flag"}).code, 0);
  EXPECT_EQ(Run({"--engine", "a"}).code, 1);
}

TEST_F(DaemonTest, CheckConfig) {
  const std::string file = root_ + "/c.yaml";
  std::ofstream(file) << "log_level: info\nengine:\n  workers: 3\n";
  const Exit good = Run({"--check-config", "--config", file});
  EXPECT_EQ(good.code, 0);
  EXPECT_EQ(good.output, file + ": ok\n");
  const Exit verbose =
      Run({"--check-config", "--config", file, "--log-level", "debug"});
  EXPECT_THAT(verbose.output, HasSubstr("  workers: 3\n"));
  std::ofstream(file) << "log_level: info\nengines: 3\n";
  const Exit bad = Run({"--check-config", "--config", file});
  EXPECT_EQ(bad.code, 1);
  EXPECT_THAT(bad.output, HasSubstr(file + ":2: unknown key \"engines\""));
}

TEST_F(DaemonTest, EndsCleanlyAtSigterm) {
  const pid_t pid = StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  ::kill(pid, SIGTERM);
  const Exit exit = AwaitExit(pid);
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(exit.output, AllOf(HasSubstr("drained"), HasSubstr("ended")));
  EXPECT_TRUE(ClosedByPeer(session->get()));
  EXPECT_FALSE(Exists(socket_));
}

TEST_F(DaemonTest, SecondDaemonOnTheSameStateIsRefused) {
  const pid_t pid = StartDaemon();
  const Exit second =
      Run({"--state-dir", state_, "--socket", root_ + "/other.sock"});
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.output,
              HasSubstr(absl::StrCat("state directory ", state_,
                                     " is in use by process ", pid)));
  const Exit third =
      Run({"--state-dir", root_ + "/other", "--socket", socket_});
  EXPECT_EQ(third.code, 1);
  EXPECT_THAT(third.output,
              HasSubstr(absl::StrCat("socket ", socket_,
                                     " is in use by process ", pid)));
  EXPECT_TRUE(Connect().ok());
}

TEST_F(DaemonTest, KilledDaemonLeavesNothingThatStopsTheNext) {
  const pid_t first = StartDaemon();
  auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  ::kill(first, SIGKILL);
  AwaitExit(first);
  ASSERT_TRUE(Exists(socket_));
  // Its engine ends by itself, and the session with it.
  EXPECT_TRUE(ClosedByPeer(session->get()));
  StartDaemon();
  EXPECT_TRUE(Open("a").ok());
}

TEST_F(DaemonTest, KilledEngineIsReplaced) {
  StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const v1::Job before = GetJob("a");
  ASSERT_GT(before.engine_pid(), 0);
  ::kill(static_cast<pid_t>(before.engine_pid()), SIGKILL);
  EXPECT_TRUE(ClosedByPeer(session->get()));
  const auto again = Open("a");
  ASSERT_TRUE(again.ok()) << again.status();
  const v1::Job after = GetJob("a");
  EXPECT_NE(after.engine_pid(), before.engine_pid());
  EXPECT_EQ(after.engine_restarts(), 1u);
}

TEST_F(DaemonTest, AdminOverTheUnixSocketAndTcp) {
  StartDaemon({"--listen", "127.0.0.1:0"});
  grpc::ClientContext context;
  v1::ServerStatus status;
  ASSERT_TRUE(Admin()->GetStatus(&context, {}, &status).ok());
  EXPECT_EQ(status.state_dir(), state_);
  EXPECT_EQ(status.pid(), started_[0]);
  EXPECT_GT(status.workers(), 0u);
  EXPECT_FALSE(status.instruction_set().empty());
  EXPECT_FALSE(status.huge_pages().empty());
  ASSERT_EQ(status.listen_size(), 1);
  grpc::ClientContext tcp_context;
  EXPECT_TRUE(
      Admin(status.listen(0))->GetStatus(&tcp_context, {}, &status).ok());
}

TEST_F(DaemonTest, DeleteAndDrain) {
  StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  grpc::ClientContext delete_context;
  v1::DeleteJobRequest request;
  request.set_name("a");
  request.set_force(true);
  v1::DeleteJobReply reply;
  const grpc::Status deleted =
      Admin()->DeleteJob(&delete_context, request, &reply);
  EXPECT_TRUE(deleted.ok()) << deleted.error_message();
  EXPECT_FALSE(Exists(state_ + "/jobs/a"));

  for (const bool resume : {false, true}) {
    grpc::ClientContext context;
    v1::DrainRequest drain;
    drain.set_resume(resume);
    v1::DrainReply drained;
    ASSERT_TRUE(Admin()->Drain(&context, drain, &drained).ok());
    EXPECT_EQ(Open("b").ok(), resume);
  }
}

TEST_F(DaemonTest, OtherUsersMayLookButNotChange) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  ASSERT_EQ(::chmod(root_.c_str(), 0755), 0);
  StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const int self = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  const pid_t child = ::fork();
  if (child == 0) {
    // A new program, because gRPC does not outlive a fork; by its fd, because
    // the user may not be allowed to walk to its path.
    char* argv[] = {const_cast<char*>("probe"), const_cast<char*>(kProbeFlag),
                    socket_.data(), nullptr};
    if (::setuid(4711) == 0) ::fexecve(self, argv, environ);
    ::_exit(100);
  }
  ::close(self);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "exit status of ProbeAsOtherUser";
  EXPECT_TRUE(Open("a").ok());
}

TEST_F(DaemonTest, SighupTakesLogLevelAndLimits) {
  const std::string file = root_ + "/c.yaml";
  std::ofstream(file) << "limits: {jobs_max: 1}\n";
  const pid_t pid = StartDaemon({"--config", file});
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE(absl::IsResourceExhausted(Open("b").status()));
  std::ofstream(file) << "limits: {jobs_max: nonsense}\n";
  ::kill(pid, SIGHUP);
  EXPECT_TRUE(Eventually(
      [this] { return absl::StrContains(Log(), "stays as it is"); }));
  std::ofstream(file) << "limits: {jobs_max: 2}\n";
  ::kill(pid, SIGHUP);
  EXPECT_TRUE(
      Eventually([this] { return absl::StrContains(Log(), "jobs_max 2"); }));
  EXPECT_TRUE(Open("b").ok());
}

TEST_F(DaemonTest, EmbeddedDaemonGoesWithItsTrainer) {
  int lifeline[2];
  ASSERT_EQ(::pipe2(lifeline, 0), 0);
  UniqueFd read_end(lifeline[0]);
  UniqueFd write_end(lifeline[1]);
  ::fcntl(write_end.get(), F_SETFD, FD_CLOEXEC);
  ASSERT_EQ(::mkdir(state_.c_str(), 0700), 0);
  socket_ = state_ + "/s.sock";
  const pid_t pid = StartDaemon({"--embedded", absl::StrCat(read_end.get())});
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  write_end.reset();
  EXPECT_EQ(AwaitExit(pid).code, 0);
  EXPECT_FALSE(Exists(state_));
  EXPECT_EQ(Log(), "");  // nothing to warn of
}

TEST_F(DaemonTest, EmbeddedDaemonCleansUpAtSigtermToo) {
  int lifeline[2];
  ASSERT_EQ(::pipe2(lifeline, 0), 0);
  const UniqueFd read_end(lifeline[0]);
  const UniqueFd write_end(lifeline[1]);
  const pid_t pid = StartDaemon({"--embedded", absl::StrCat(read_end.get())});
  ::kill(pid, SIGTERM);
  EXPECT_EQ(AwaitExit(pid).code, 0);
  EXPECT_FALSE(Exists(state_));
  EXPECT_FALSE(Exists(socket_));
  EXPECT_FALSE(Exists(socket_ + ".lock"));
}

// Run as another user than the daemon and the job's owner: 0 when that user can
// look and cannot change.
int ProbeAsOtherUser(const std::string& socket) {
  const auto stub = v1::Admin::NewStub(grpc::CreateChannel(
      "unix:" + socket, grpc::InsecureChannelCredentials()));
  grpc::ClientContext look;
  v1::ServerStatus status;
  if (!stub->GetStatus(&look, {}, &status).ok()) return 1;
  grpc::ClientContext drain;
  v1::DrainReply drained;
  if (stub->Drain(&drain, {}, &drained).error_code() !=
      grpc::StatusCode::PERMISSION_DENIED) {
    return 2;
  }
  grpc::ClientContext remove;
  v1::DeleteJobRequest request;
  request.set_name("a");
  v1::DeleteJobReply removed;
  return stub->DeleteJob(&remove, request, &removed).error_code() ==
                 grpc::StatusCode::PERMISSION_DENIED
             ? 0
             : 3;
}

}  // namespace
}  // namespace optstate

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], optstate::kProbeFlag) == 0) {
    return optstate::ProbeAsOtherUser(argv[2]);
  }
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
