// The real optstated as a process: its command line, start and end, and what
// only whole processes show. The supervisor's decisions are tested beside it.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "proto/types/unique_fd.h"
#include "server/testing/daemon_fixture.h"

namespace optstate::server {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kProbeFlag[] = "--probe-as-other-user";

TEST_F(DaemonTest, CommandLine) {
  EXPECT_THAT(RunToEnd({"--version"}).output, HasSubstr("optstated 0."));
  EXPECT_THAT(RunToEnd({"--help"}).output,
              AllOf(HasSubstr("--check-config"), HasSubstr("SIGTERM")));
  EXPECT_EQ(RunToEnd({"--no-such-flag"}).code, 2);
  EXPECT_EQ(RunToEnd({"--config"}).code, 2);
  EXPECT_EQ(RunToEnd({"--embedded", "x"}).code, 2);
  EXPECT_EQ(RunToEnd({"--log-level", "bogus"}).code, 2);
  EXPECT_EQ(RunToEnd({"--listen", "x"}).code, 2);
  for (const char* flag :
       {"--config", "--state-dir", "--socket", "--listen", "--log-level"}) {
    EXPECT_EQ(RunToEnd({"--check-config", flag, ""}).code, 2) << flag;
    EXPECT_EQ(RunToEnd({"--check-config", absl::StrCat(flag, "=")}).code, 2)
        << flag;
  }
  EXPECT_EQ(RunToEnd({"--engine", "a"}).code, 1);
}

TEST_F(DaemonTest, CheckConfig) {
  const std::string file = root() + "/c.yaml";
  std::ofstream(file) << "log_level: info\nengine:\n  workers: 3\n";
  const ProcessExit good = RunToEnd({"--check-config", "--config", file});
  EXPECT_EQ(good.code, 0);
  EXPECT_EQ(good.output, file + ": ok\n");
  const ProcessExit verbose =
      RunToEnd({"--check-config", "--config", file, "--log-level", "debug"});
  EXPECT_THAT(verbose.output, HasSubstr("  workers: 3\n"));
  std::ofstream(file) << "log_level: info\nengines: 3\n";
  const ProcessExit bad = RunToEnd({"--check-config", "--config", file});
  EXPECT_EQ(bad.code, 1);
  EXPECT_THAT(bad.output, HasSubstr(file + ":2: unknown key \"engines\""));
}

TEST_F(DaemonTest, WhatIsSaidBeforeTheConfigurationIsReadFollowsTheFlag) {
  const std::string file = root() + "/c.yaml";
  std::ofstream(file) << "engines: 3\n";
  const ProcessExit text = RunToEnd({"--config", file});
  EXPECT_EQ(text.code, 1);
  EXPECT_THAT(text.output, StartsWith("optstated: "));
  const ProcessExit json = RunToEnd({"--config", file, "--log-format", "json"});
  EXPECT_EQ(json.code, 1);
  // The output is that of both.
  const std::string said = json.output.substr(text.output.size());
  EXPECT_THAT(said, StartsWith("{\"time\":\""));
  EXPECT_THAT(said,
              HasSubstr("\"level\":\"error\",\"process\":\"supervisor\""));
  EXPECT_THAT(said, HasSubstr("unknown key \\\"engines\\\""));
  EXPECT_THAT(said, EndsWith("}\n"));
  const ProcessExit logfmt =
      RunToEnd({"--config", file, "--log-format", "logfmt"});
  EXPECT_EQ(logfmt.code, 1);
  const std::string pairs = logfmt.output.substr(json.output.size());
  EXPECT_THAT(pairs, StartsWith("ts="));
  EXPECT_THAT(pairs, HasSubstr(" level=error event=\""));
  EXPECT_THAT(pairs, HasSubstr("unknown key \\\"engines\\\""));
  EXPECT_THAT(pairs, EndsWith(" process=supervisor\n"));
  EXPECT_EQ(RunToEnd({"--log-format", "xml"}).code, 2);
}

TEST_F(DaemonTest, ClosedStandardStreamsAreOpened) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    (void)::close_range(0, 2, 0);
    ::execl("server/optstated", "optstated", "--state-dir", state().c_str(),
            "--socket", socket().c_str(), nullptr);
    ::_exit(127);
  }
  ASSERT_TRUE(Eventually([this] { return Open("a").ok(); }));
  for (const int64_t process : {int64_t{pid}, GetJob("a").engine_pid()}) {
    for (const int fd : {0, 1, 2}) {
      EXPECT_EQ(std::filesystem::read_symlink(
                    absl::StrCat("/proc/", process, "/fd/", fd)),
                "/dev/null");
    }
  }
}

TEST_F(DaemonTest, FewFdsAreSaidAtTheStart) {
  const std::string file = root() + "/c.yaml";
  std::ofstream(file) << "limits: {jobs_max: 4294967295}\n";
  StartDaemon({"--config", file});
  EXPECT_TRUE(Eventually([this] {
    return absl::StrContains(Log(), "limits.jobs_max 4294967295");
  })) << Log();
}

TEST_F(DaemonTest, EndsCleanlyAtSigterm) {
  const pid_t pid = StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  ::kill(pid, SIGTERM);
  const ProcessExit exit = AwaitExit(pid);
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(exit.output,
              AllOf(HasSubstr("no step is open"), HasSubstr("ended")));
  EXPECT_TRUE(ClosedByPeer(session->get()));
  EXPECT_FALSE(Exists(socket()));
}

TEST_F(DaemonTest, RemovedStateDirectoryTakesNoNewJob) {
  StartDaemon();
  ASSERT_TRUE(Open("a").ok());
  for (const std::string& moved : {state(), state() + "/jobs"}) {
    std::filesystem::rename(moved, root() + "/away");
    const absl::Status refused = Open("b").status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(state() + " was removed or replaced"));
    std::filesystem::rename(root() + "/away", moved);
  }
  EXPECT_TRUE(Open("b").ok());
}

TEST_F(DaemonTest, SecondDaemonOnTheSameStateIsRefused) {
  const pid_t pid = StartDaemon();
  const ProcessExit second =
      RunToEnd({"--state-dir", state(), "--socket", root() + "/other.sock"});
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.output,
              HasSubstr(absl::StrCat("state directory ", state(),
                                     " is in use by process ", pid)));
  const ProcessExit third =
      RunToEnd({"--state-dir", root() + "/other", "--socket", socket()});
  EXPECT_EQ(third.code, 1);
  EXPECT_THAT(third.output,
              HasSubstr(absl::StrCat("socket ", socket(),
                                     " is in use by process ", pid)));
  EXPECT_TRUE(Connect().ok());
}

// The killed daemon's engine and session go on, and the next daemon adopts
// them.
TEST_F(DaemonTest, KilledDaemonsEngineIsAdopted) {
  const pid_t first = StartDaemon();
  auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const int64_t engine_pid = GetJob("a").engine_pid();
  ::kill(first, SIGKILL);
  AwaitExit(first);
  ASSERT_TRUE(Exists(socket()));
  const pid_t second = StartDaemon();
  EXPECT_TRUE(Open("a").ok());
  const v1::Job job = GetJob("a");
  EXPECT_EQ(job.engine_pid(), engine_pid);
  EXPECT_EQ(job.engine_restarts(), 0u);
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_EMPTY);  // reported by the engine itself
  char nothing;
  EXPECT_EQ(::recv(session->get(), &nothing, 1, MSG_DONTWAIT), -1)
      << "the session was closed";
  ::kill(second, SIGTERM);
  EXPECT_EQ(AwaitExit(second).code, 0);
  EXPECT_TRUE(ClosedByPeer(session->get()));
  EXPECT_EQ(AwaitOrphan(engine_pid), 0);
}

TEST_F(DaemonTest, ASecondSignalLeavesNoEngineBehind) {
  const pid_t pid = StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  ::kill(pid, SIGINT);
  ::kill(pid, SIGTERM);
  AwaitExit(pid);
  EXPECT_TRUE(ClosedByPeer(session->get()));
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

TEST_F(DaemonTest, StoppedEngineHoldsUpItsJobAlone) {
  const std::string file = root() + "/c.yaml";
  // The unregistered job must not be over before the end.
  std::ofstream(file) << "limits: {handshake_timeout_ms: 100000}\n";
  StartDaemon({"--config", file});
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const auto engine = static_cast<pid_t>(GetJob("a").engine_pid());
  ::kill(engine, SIGSTOP);
  absl::Status late;
  std::thread waiting([this, &late] { late = Open("a").status(); });
  EXPECT_TRUE(Open("b").ok());
  const v1::Job job = GetJob("a");
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_UNSPECIFIED);
  EXPECT_FALSE(job.reason().empty());
  ::kill(engine, SIGCONT);
  waiting.join();
  EXPECT_TRUE(late.ok()) << late;
  EXPECT_EQ(GetJob("a").engine_pid(), engine);
}

TEST_F(DaemonTest, AdminOverTheUnixSocketAndTcp) {
  const pid_t pid = StartDaemon({"--listen", "127.0.0.1:0", "--insecure"});
  grpc::ClientContext context;
  v1::ServerStatus status;
  ASSERT_TRUE(Admin()->GetStatus(&context, {}, &status).ok());
  EXPECT_EQ(status.state_dir(), state());
  EXPECT_EQ(status.pid(), pid);
  EXPECT_GT(status.workers(), 0u);
  EXPECT_FALSE(status.instruction_set().empty());
  EXPECT_FALSE(status.huge_pages().empty());
  ASSERT_EQ(status.listen_size(), 1);
  grpc::ClientContext tcp_context;
  EXPECT_TRUE(
      Admin(status.listen(0))->GetStatus(&tcp_context, {}, &status).ok());
}

// Calls a method with raw bytes: the protos are not installed with gRPC.
std::string Call(const std::string& socket, const std::string& method,
                 const std::string& request) {
  grpc::GenericStub stub(grpc::CreateChannel(
      "unix:" + socket, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  grpc::Slice slice(request);
  grpc::ByteBuffer sent(&slice, 1);
  grpc::ByteBuffer received;
  absl::Notification done;
  std::string reply;
  stub.UnaryCall(&context, method, {}, &sent, &received,
                 [&](const grpc::Status& status) {
                   EXPECT_TRUE(status.ok()) << status.error_message();
                   done.Notify();
                 });
  done.WaitForNotification();
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(received.Dump(&slices).ok());
  for (const grpc::Slice& part : slices) {
    reply.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  return reply;
}

TEST_F(DaemonTest, HealthAndReflection) {
  StartDaemon();
  // HealthCheckResponse.status = SERVING.
  for (const char* service : {"", "\x0a\x11optstate.v1.Admin"}) {
    EXPECT_EQ(Call(socket(), "/grpc.health.v1.Health/Check", service),
              std::string("\x08\x01"));
  }
  // ServerReflectionRequest.list_services = "".
  EXPECT_THAT(
      Call(socket(),
           "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
           std::string("\x3a\x00", 2)),
      HasSubstr("optstate.v1.Admin"));
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
  EXPECT_FALSE(Exists(state() + "/jobs/a"));

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
  ASSERT_EQ(::chmod(root().c_str(), 0755), 0);
  StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const int self = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  const pid_t child = ::fork();
  if (child == 0) {
    // The probe is a new program, because gRPC does not survive a fork; it is
    // executed by its fd, because the user may not have access to its path.
    char* argv[] = {const_cast<char*>("probe"), const_cast<char*>(kProbeFlag),
                    const_cast<char*>(socket().c_str()), nullptr};
    if (::setuid(4711) == 0) ::fexecve(self, argv, environ);
    ::_exit(100);
  }
  ::close(self);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "exit status of ProbeAsOtherUser";
  EXPECT_TRUE(Open("a").ok());
}

TEST_F(DaemonTest, EmbeddedDaemonIsNotUpgraded) {
  int lifeline[2];
  ASSERT_EQ(::pipe2(lifeline, 0), 0);
  const UniqueFd read_end(lifeline[0]);
  const UniqueFd write_end(lifeline[1]);
  StartDaemon({"--embedded", absl::StrCat(read_end.get())});
  EXPECT_TRUE(absl::IsFailedPrecondition(Upgrade("").status()));
}

TEST_F(DaemonTest, EmbeddedDaemonGoesWithItsTrainer) {
  int lifeline[2];
  ASSERT_EQ(::pipe2(lifeline, 0), 0);
  UniqueFd read_end(lifeline[0]);
  UniqueFd write_end(lifeline[1]);
  ::fcntl(write_end.get(), F_SETFD, FD_CLOEXEC);
  ASSERT_EQ(::mkdir(state().c_str(), 0700), 0);
  set_socket(state() + "/s.sock");
  const pid_t pid = StartDaemon({"--embedded", absl::StrCat(read_end.get())});
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  write_end.reset();
  EXPECT_EQ(AwaitExit(pid).code, 0);
  EXPECT_FALSE(Exists(state()));
  EXPECT_EQ(Log(), "");  // nothing to warn of
}

TEST_F(DaemonTest, KilledEmbeddedDaemonLeavesNoEngine) {
  int lifeline[2];
  ASSERT_EQ(::pipe2(lifeline, 0), 0);
  const UniqueFd read_end(lifeline[0]);
  const UniqueFd write_end(lifeline[1]);
  ::fcntl(write_end.get(), F_SETFD, FD_CLOEXEC);
  const pid_t pid = StartDaemon({"--embedded", absl::StrCat(read_end.get())});
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const int64_t engine_pid = GetJob("a").engine_pid();
  ::kill(pid, SIGKILL);
  AwaitExit(pid);
  EXPECT_TRUE(ClosedByPeer(session->get()));
  EXPECT_EQ(AwaitOrphan(engine_pid), 0);
}

TEST_F(DaemonTest, EmbeddedDaemonCleansUpAtSigtermToo) {
  int lifeline[2];
  ASSERT_EQ(::pipe2(lifeline, 0), 0);
  const UniqueFd read_end(lifeline[0]);
  const UniqueFd write_end(lifeline[1]);
  const pid_t pid = StartDaemon({"--embedded", absl::StrCat(read_end.get())});
  ::kill(pid, SIGTERM);
  EXPECT_EQ(AwaitExit(pid).code, 0);
  EXPECT_FALSE(Exists(state()));
  EXPECT_FALSE(Exists(socket()));
  EXPECT_FALSE(Exists(socket() + ".lock"));
}

// Runs as another user than the daemon's and the job's owner; returns 0 when
// that user can read and cannot change.
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
  grpc::ClientContext verify;
  v1::VerifyJobRequest verified;
  verified.set_name("a");
  if (stub->VerifyJob(&verify, verified)->Finish().error_code() !=
      grpc::StatusCode::PERMISSION_DENIED) {
    return 4;
  }
  grpc::ClientContext trace;
  v1::TraceJobRequest traced;
  traced.set_name("a");
  if (stub->TraceJob(&trace, traced)->Finish().error_code() !=
      grpc::StatusCode::PERMISSION_DENIED) {
    return 5;
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
}  // namespace optstate::server

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], optstate::server::kProbeFlag) == 0) {
    return optstate::server::ProbeAsOtherUser(argv[2]);
  }
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
