// The real optstated is replaced while it runs: by SIGHUP, by Upgrade, and
// after a kill.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/unique_fd.h"
#include "server/testing/daemon_fixture.h"

namespace optstate::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(DaemonTest, SighupReadsTheConfigurationAndKeepsEngines) {
  const std::string file = root() + "/c.yaml";
  std::ofstream(file) << "limits: {jobs_max: 1}\n";
  const pid_t pid = StartDaemon({"--config", file});
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const int64_t engine_pid = GetJob("a").engine_pid();
  EXPECT_TRUE(absl::IsResourceExhausted(Open("b").status()));
  std::ofstream(file) << "limits: {jobs_max: nonsense}\n";
  ::kill(pid, SIGHUP);
  EXPECT_TRUE(Eventually(
      [this] { return absl::StrContains(Log(), "stays as it is"); }));
  std::ofstream(file) << "limits: {jobs_max: 2}\nsocket_mode: '0600'\n";
  ::kill(pid, SIGHUP);
  EXPECT_TRUE(Eventually([this] { return Open("b").ok(); }));
  // The build is the same, and so are its engines.
  EXPECT_TRUE(Eventually([this] {
    return absl::StrContains(Log(), "upgrade: done, 0 engines replaced");
  }));
  EXPECT_EQ(GetJob("a").engine_pid(), engine_pid);
  EXPECT_EQ(std::filesystem::status(socket()).permissions(),
            std::filesystem::perms(0600));
  // The daemon remains a child of the test, can be signalled again, and ends
  // normally.
  ::kill(pid, SIGTERM);
  EXPECT_EQ(AwaitExit(pid).code, 0);
  EXPECT_FALSE(Exists(socket()));
}

TEST_F(DaemonTest, UpgradeToAnotherBinary) {
  const pid_t pid = StartDaemon({"--listen", "127.0.0.1:0", "--insecure"});
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const int64_t engine_pid = GetJob("a").engine_pid();
  const v1::ServerStatus before = *Status();
  // Upgrades twice: the second time from the build that the first one started.
  for (const std::string name : {"one", "two"}) {
    const std::string binary = CopyOfTheBinary(name);
    const auto reply = Upgrade(binary);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_FALSE(reply->version().empty());
    const v1::ServerStatus status = AwaitUpgrade(reply->id());
    EXPECT_EQ(status.upgrade().engines_replaced(), 1u);
    EXPECT_EQ(status.upgrade().problems_size(), 0);
    EXPECT_EQ(status.pid(), pid);
    EXPECT_EQ(status.listen(0), before.listen(0));  // the same socket
    EXPECT_EQ(ExecutableOf(pid), binary);
    EXPECT_EQ(ExecutableOf(GetJob("a").engine_pid()), binary);
  }
  EXPECT_TRUE(ClosedByPeer(session->get()));
  EXPECT_NE(GetJob("a").engine_pid(), engine_pid);
  EXPECT_EQ(GetJob("a").engine_restarts(), 0u);
  EXPECT_TRUE(Open("a").ok());
  // Locks and sockets were handed over.
  const ProcessExit second =
      RunToEnd({"--state-dir", state(), "--socket", root() + "/other.sock"});
  EXPECT_THAT(second.output,
              HasSubstr(absl::StrCat("is in use by process ", pid)));
  ::kill(pid, SIGTERM);
  EXPECT_EQ(AwaitExit(pid).code, 0);
  EXPECT_FALSE(Exists(socket()));
}

// The socket never closes: connections meanwhile wait.
TEST_F(DaemonTest, NobodyIsTurnedAwayByAnUpgrade) {
  StartDaemon();
  std::atomic<bool> done{false};
  std::thread knocking([this, &done] {
    while (!done) {
      EXPECT_TRUE(Connect().ok());
      ::poll(nullptr, 0, 1);  // connects at a moderate rate
    }
  });
  const auto reply = Upgrade(CopyOfTheBinary("next"));
  if (reply.ok()) AwaitUpgrade(reply->id());
  done = true;
  knocking.join();
  EXPECT_TRUE(reply.ok()) << reply.status();
}

TEST_F(DaemonTest, UpgradeThatCannotBeIsRefused) {
  const pid_t pid = StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const int64_t engine_pid = GetJob("a").engine_pid();
  EXPECT_TRUE(absl::IsNotFound(Upgrade(root() + "/absent").status()));
  const std::string older = root() + "/older";
  std::ofstream(older)
      << "#!/bin/sh\n"
         "echo 'version: \"0.0.7\" session_min: 1 session_max: 1 control_min: "
         "1 control_max: 1 state_max: 0 handover: 1'\n";
  EXPECT_TRUE(absl::IsPermissionDenied(Upgrade(older).status()));
  ASSERT_EQ(::chmod(older.c_str(), 0700), 0);
  const absl::Status refused = Upgrade(older).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("0.0.7"), HasSubstr("0.1."), HasSubstr("state format")));
  EXPECT_EQ(ExecutableOf(pid), ExecutableOf(engine_pid));
  EXPECT_EQ(GetJob("a").engine_pid(), engine_pid);
  EXPECT_FALSE(Status()->has_upgrade());
}

// The next build passes every check, and then cannot be executed.
TEST_F(DaemonTest, UpgradeThatFailsLeavesTheDaemonAsItWas) {
  const pid_t pid = StartDaemon();
  const std::string binary = root() + "/vanishes";
  std::ofstream(binary)
      << "#!/bin/sh\ncase \"$*\" in *--check-config*) rm \"$0\";; *) exec "
      << ExecutableOf(pid) << " --format-versions;; esac\n";
  ASSERT_EQ(::chmod(binary.c_str(), 0700), 0);
  const auto reply = Upgrade(binary);
  ASSERT_TRUE(reply.ok()) << reply.status();
  const v1::ServerStatus status = AwaitUpgrade(reply->id());
  ASSERT_EQ(status.upgrade().problems_size(), 1);
  EXPECT_THAT(status.upgrade().problems(0), HasSubstr("vanishes"));
  EXPECT_TRUE(Open("a").ok());
  // The upgrade can be tried again.
  const auto again = Upgrade("");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(AwaitUpgrade(again->id()).upgrade().problems_size(), 0);
  EXPECT_EQ(ExecutableOf(pid), ExecutableOf(GetJob("a").engine_pid()));
}

TEST_F(DaemonTest, AnEngineThatDiesDuringTheUpgradeIsReaped) {
  const pid_t pid = StartDaemon();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const int64_t engine_pid = GetJob("a").engine_pid();
  const std::string binary = root() + "/kills";
  // The script uses builtins alone: a shell that waits for a command would reap
  // the engine.
  std::ofstream(binary) << "#!/bin/sh\ncase \"$*\" in *--handover-fd*)\n"
                        << "kill -9 " << engine_pid << "\n"
                        << "while read -r stat < /proc/" << engine_pid
                        << "/stat; do case \"$stat\" in *') Z '*) break;; "
                           "esac; done;; esac\nexec "
                        << ExecutableOf(pid) << " \"$@\"\n";
  ASSERT_EQ(::chmod(binary.c_str(), 0700), 0);
  const auto reply = Upgrade(binary);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(AwaitUpgrade(reply->id()).pid(), pid);
  EXPECT_FALSE(Exists(absl::StrCat("/proc/", engine_pid)));
  EXPECT_TRUE(Open("a").ok());
}

TEST_F(DaemonTest, UpgradeKeepsADrainedDaemonDrained) {
  StartDaemon();
  grpc::ClientContext context;
  v1::DrainReply drained;
  ASSERT_TRUE(Admin()->Drain(&context, {}, &drained).ok());
  const auto reply = Upgrade("");
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(AwaitUpgrade(reply->id()).draining());
  EXPECT_TRUE(absl::IsUnavailable(Open("a").status()));
  // The next build continues the events, which say so already.
  const auto admin = Admin();
  grpc::ClientContext watch;
  const auto events = admin->WatchEvents(&watch, {});
  v1::Event event;
  int times_begun = 0;
  while (events->Read(&event)) {
    if (event.kind() == "drain_begun") ++times_begun;
  }
  EXPECT_TRUE(events->Finish().ok());
  EXPECT_EQ(times_begun, 1);
}

// The operator who drained the node relies on this, though no call asks for it.
TEST_F(DaemonTest, AKilledDaemonsSuccessorGoesOnDraining) {
  const pid_t pid = StartDaemon();
  grpc::ClientContext context;
  v1::DrainRequest drain;
  v1::DrainReply drained;
  ASSERT_TRUE(Admin()->Drain(&context, drain, &drained).ok());
  ::kill(pid, SIGKILL);
  AwaitExit(pid);
  StartDaemon();
  absl::StatusOr<v1::ServerStatus> status;
  ASSERT_TRUE(Eventually([&] {  // over a connection of the first
    status = Status();
    return status.ok();
  }));
  EXPECT_TRUE(status->draining());
  EXPECT_TRUE(absl::IsUnavailable(Open("a").status()));
  grpc::ClientContext resume_context;
  drain.set_resume(true);
  ASSERT_TRUE(Admin()->Drain(&resume_context, drain, &drained).ok());
  EXPECT_TRUE(Open("a").ok());
}

// A cleanup of /tmp may remove the socket.
TEST_F(DaemonTest, SighupMendsARemovedSocket) {
  for (const bool with_lock : {false, true}) {
    set_socket(absl::StrCat(root(), "/", with_lock, "/s.sock"));
    const pid_t pid = StartDaemon();
    const auto session = Open("a");
    ASSERT_TRUE(session.ok()) << session.status();
    if (with_lock) {
      std::filesystem::remove_all(root() + "/1");
    } else {
      std::filesystem::remove(socket());
    }
    ASSERT_FALSE(Connect().ok());
    ::kill(pid, SIGHUP);
    EXPECT_TRUE(Eventually([this] { return Open("a").ok(); })) << Log();
    EXPECT_TRUE(Exists(socket() + ".lock"));
    // Upgrades once more, with the socket handed over.
    const auto reply = Upgrade("");
    ASSERT_TRUE(reply.ok()) << reply.status();
    AwaitUpgrade(reply->id());
    EXPECT_TRUE(Open("a").ok());
    ::kill(pid, SIGTERM);
    EXPECT_EQ(AwaitExit(pid).code, 0);
    EXPECT_FALSE(Exists(socket()));
  }
}

TEST_F(DaemonTest, WhatTheNextBuildCannotHaveIsRefusedBefore) {
  const UniqueFd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const as_any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(taken.get(), as_any, size), 0);
  ASSERT_EQ(::listen(taken.get(), 1), 0);
  ASSERT_EQ(::getsockname(taken.get(), as_any, &size), 0);
  const std::string file = root() + "/c.yaml";
  std::ofstream(file) << "log_level: info\n";
  const pid_t pid = StartDaemon({"--config", file});
  const std::pair<std::string, std::string> faults[] = {
      {absl::StrCat("listen: ['unix:", root(), "/new.sock', '127.0.0.1:",
                    ntohs(address.sin_port), "']\ninsecure_tcp: true\n"),
       "Address already in use"},
      {"listen: ['127.0.0.1:1']\n", "insecure_tcp: true"},
      {"limits: {jobs_max: nonsense}\n", "jobs_max"},
      {"huge_pages: mount\n", "huge_pages"},
      {"access: {trainer_groups: [no such group]}\n",
       "access.trainer_groups: this machine has no group"},
      {absl::StrCat("listen: ['unix:", socket(), "']\n"), "already"}};
  for (const auto& [text, fault] : faults) {
    std::ofstream(file) << text;
    const absl::Status refused = Upgrade("").status();
    EXPECT_THAT(std::string(refused.message()), HasSubstr(fault));
    EXPECT_FALSE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_FALSE(Status()->has_upgrade());
    EXPECT_FALSE(Exists(root() + "/new.sock"));
  }
  std::filesystem::remove(file);
  const absl::Status absent = Upgrade("").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(absent)) << absent;
  EXPECT_THAT(std::string(absent.message()), HasSubstr(file));
  std::ofstream(file) << "log_level: debug\n";
  ASSERT_EQ(::rename(state().c_str(), (state() + "-away").c_str()), 0);
  EXPECT_THAT(std::string(Upgrade("").status().message()),
              HasSubstr("removed or replaced"));
  ASSERT_EQ(::rename((state() + "-away").c_str(), state().c_str()), 0);
  std::ofstream(file) << "listen: ['unix:" << root() << "/new.sock']\n";
  const auto reply = Upgrade("");
  ASSERT_TRUE(reply.ok()) << reply.status();
  AwaitUpgrade(reply->id());
  EXPECT_TRUE(Exists(root() + "/new.sock"));
  EXPECT_EQ(Status()->pid(), pid);
}

// An unregistered job is removed, also once its engine was replaced.
TEST_F(DaemonTest, AnEmptyJobGoesThoughItsEngineWasReplaced) {
  const std::string file = root() + "/c.yaml";
  std::ofstream(file) << "limits: {handshake_timeout_ms: 300}\n";
  StartDaemon({"--config", file});
  ASSERT_TRUE(Open("a").ok());  // and is gone again
  const int64_t engine_pid = GetJob("a").engine_pid();
  ::kill(static_cast<pid_t>(engine_pid), SIGKILL);
  EXPECT_TRUE(Eventually([this] { return !Exists(state() + "/jobs/a"); }))
      << Log();
}

TEST_F(DaemonTest, NobodyUpgradesOverTcpWithoutTls) {
  StartDaemon({"--listen", "127.0.0.1:0", "--insecure"});
  grpc::ClientContext context;
  v1::UpgradeReply reply;
  const grpc::Status status =
      Admin(Status()->listen(0))->Upgrade(&context, {}, &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED)
      << status.error_message();
}

}  // namespace
}  // namespace optstate::server
