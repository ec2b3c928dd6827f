#include "server/supervisor/supervisor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/control/open_sockets.h"
#include "server/supervisor/core_shares.h"
#include "server/supervisor/supervisor_harness.h"

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Harness = SupervisorHarness;

class SupervisorTest : public testing::Test {
 protected:
  // Opens a session, or fails the test.
  TestSession MustOpen(const std::string& job) {
    auto session = harness_.Open(job);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : TestSession();
  }

  bool Exists(const std::string& path) {
    return ::access(path.c_str(), F_OK) == 0;
  }

  Harness harness_;
};

TEST_F(SupervisorTest, OneEngineForAllRanksOfAJob) {
  harness_.Start();
  const TestSession a0 = MustOpen("a");
  const TestSession a1 = MustOpen("a");
  const TestSession b = MustOpen("b");
  EXPECT_EQ(a0.engine_pid, a1.engine_pid);
  EXPECT_NE(a0.engine_pid, b.engine_pid);
  EXPECT_NE(a0.engine_pid, static_cast<uint64_t>(::getpid()));
  const auto summary = harness_.Find("a");
  ASSERT_TRUE(summary.has_value());
  EXPECT_EQ(summary->uid, ::geteuid());
  EXPECT_EQ(summary->restarts, 0u);
  EXPECT_FALSE(summary->failed);
  EXPECT_TRUE(Exists(harness_.JobDirectory("a") + "/owner"));
}

// The share is set by nice values or by cgroup, whichever this machine has.
TEST_F(SupervisorTest, EnginesGetTheShareOfTheirJob) {
  harness_.config().mutable_engine()->add_job_weights("light*=50");
  harness_.Start();
  const auto engine = static_cast<pid_t>(MustOpen("light-1").engine_pid);
  const auto other = static_cast<pid_t>(MustOpen("a").engine_pid);
  const CoreShares shares = CoreShares::Find(harness_.config().engine());
  if (shares.description().find("nice values") != 0) {
    std::ifstream group(absl::StrCat("/proc/", engine, "/cgroup"));
    EXPECT_THAT(std::string(std::istreambuf_iterator<char>(group), {}),
                HasSubstr("/optstate-light-1"));
    return;
  }
  const int own = ::getpriority(PRIO_PROCESS, 0);
  if (own + 3 > 19) GTEST_SKIP() << "no nice value is left above " << own;
  EXPECT_EQ(::getpriority(PRIO_PROCESS, static_cast<id_t>(other)), own);
  EXPECT_EQ(::getpriority(PRIO_PROCESS, static_cast<id_t>(engine)), own + 3);
}

// An engine's weight is given by its present supervisor.
TEST_F(SupervisorTest, AdoptedEnginesGetTheShareOfTheirJob) {
  harness_.Start();
  const auto engine = static_cast<pid_t>(MustOpen("light-1").engine_pid);
  harness_.Abandon();
  harness_.config().mutable_engine()->add_job_weights("light*=50");
  harness_.Start();
  EXPECT_EQ(MustOpen("light-1").engine_pid, static_cast<uint64_t>(engine));
  const CoreShares shares = CoreShares::Find(harness_.config().engine());
  if (shares.description().find("nice values") != 0) {
    GTEST_SKIP() << "by cgroups: see core_shares_test";
  }
  const int own = ::getpriority(PRIO_PROCESS, 0);
  if (own + 3 > 19) GTEST_SKIP() << "no nice value is left above " << own;
  EXPECT_EQ(::getpriority(PRIO_PROCESS, static_cast<id_t>(engine)), own + 3);
}

// Every connection arrives before the engine is ready.
TEST_F(SupervisorTest, ConnectionsWaitForTheEngine) {
  harness_.Start();
  std::vector<UniqueFd> fds;
  for (int i = 0; i < 100; ++i) {
    fds.push_back(harness_.Connect());
    ASSERT_TRUE(
        Harness::SendHello(fds.back().get(), Harness::GoodHello("a")).ok());
  }
  for (const UniqueFd& fd : fds) {
    EXPECT_TRUE(Harness::ReceiveReply(fd.get()).ok());
  }
}

TEST_F(SupervisorTest, RefusalsSayWhy) {
  harness_.Start();
  v1::Hello wrong_version = Harness::GoodHello("a");
  wrong_version.set_protocol_version_min(90);
  wrong_version.set_protocol_version_max(91);
  EXPECT_TRUE(
      absl::IsFailedPrecondition(harness_.Open(wrong_version).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(harness_.Open("../x").status()));
  v1::Hello must_exist = Harness::GoodHello("absent");
  must_exist.set_must_exist(true);
  EXPECT_TRUE(absl::IsNotFound(harness_.Open(must_exist).status()));
  EXPECT_TRUE(harness_.supervisor().Jobs().empty());
}

TEST_F(SupervisorTest, JobLimit) {
  harness_.config().mutable_limits()->set_jobs_max(1);
  harness_.Start();
  const TestSession a = MustOpen("a");
  const absl::Status status = harness_.Open("b").status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("limits.jobs_max"));
  MustOpen("a");
}

TEST_F(SupervisorTest, SessionLimitFreesEndedSessions) {
  harness_.config().mutable_limits()->set_sessions_max(3);
  harness_.Start();
  TestSession a = MustOpen("a");
  const TestSession b = MustOpen("b");
  const TestSession c = MustOpen("c");
  const absl::Status status = harness_.Open("a").status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  a.fd.reset();
  // The engine sees the end of the session in its own time.
  EXPECT_TRUE(Harness::Eventually([this] { return harness_.Open("a").ok(); }));
}

TEST_F(SupervisorTest, KilledEngineIsRestarted) {
  harness_.Start();
  const TestSession before = MustOpen("a");
  ASSERT_EQ(::kill(static_cast<pid_t>(before.engine_pid), SIGKILL), 0);
  EXPECT_TRUE(Harness::ClosedByPeer(before.fd.get()));
  const TestSession after = MustOpen("a");
  EXPECT_NE(after.engine_pid, before.engine_pid);
  EXPECT_EQ(harness_.Find("a")->restarts, 1u);
}

TEST_F(SupervisorTest, EngineThatKeepsDyingFailsItsJobAlone) {
  harness_.config().mutable_engine()->set_restarts_max(2);
  harness_.Start();
  const TestSession other = MustOpen("other");
  const absl::Status status = harness_.Open("dies-at-start").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("FAILED"), HasSubstr("exited with status 3"),
                    HasSubstr("restarted 2 times")));
  EXPECT_TRUE(harness_.Find("dies-at-start")->failed);
  EXPECT_TRUE(Exists(harness_.JobDirectory("dies-at-start")));
  EXPECT_FALSE(harness_.Open("dies-at-start").ok());
  EXPECT_EQ(MustOpen("other").engine_pid, other.engine_pid);
}

TEST_F(SupervisorTest, DeathBySignalIsNamed) {
  harness_.config().mutable_engine()->set_restarts_max(0);
  harness_.Start();
  EXPECT_FALSE(harness_.Open("dies-on-hello").ok());
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("dies-on-hello")->failed; }));
  EXPECT_THAT(harness_.Find("dies-on-hello")->reason,
              HasSubstr("killed by signal 9"));
}

TEST_F(SupervisorTest, EngineThatCannotStartSaysWhy) {
  harness_.config().mutable_engine()->set_restarts_max(1);
  harness_.Start();
  const absl::Status status = harness_.Open("gives-up").status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("exited with status 3: somebody has the lock"));
  EXPECT_THAT(harness_.Find("gives-up")->reason,
              HasSubstr("somebody has the lock"));
}

TEST_F(SupervisorTest, FinishedJobIsRemoved) {
  harness_.Start();
  TestSession session = MustOpen("one-session");
  EXPECT_TRUE(Exists(harness_.JobDirectory("one-session")));
  session.fd.reset();
  EXPECT_TRUE(Harness::Eventually(
      [this] { return !harness_.Find("one-session").has_value(); }));
  EXPECT_FALSE(Exists(harness_.JobDirectory("one-session")));
}

TEST_F(SupervisorTest, JobsAreThereAgainAfterARestart) {
  harness_.Start();
  const TestSession before = MustOpen("a");
  harness_.Stop();
  EXPECT_TRUE(Harness::ClosedByPeer(before.fd.get()));
  harness_.Start();
  EXPECT_TRUE(harness_.Find("a").has_value());
  v1::Hello hello = Harness::GoodHello("a");
  hello.set_must_exist(true);
  const auto after = harness_.Open(hello);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_NE(after->engine_pid, before.engine_pid);
}

TEST_F(SupervisorTest, EnginesOutliveTheirSupervisorAndAreAdopted) {
  harness_.Start();
  const TestSession a = MustOpen("a");
  const TestSession b = MustOpen("b");
  // Two in a row.
  for (int i = 0; i < 2; ++i) {
    harness_.Abandon();
    harness_.Start();
    EXPECT_EQ(MustOpen("a").engine_pid, a.engine_pid);
    EXPECT_EQ(MustOpen("b").engine_pid, b.engine_pid);
    EXPECT_EQ(harness_.Find("a")->engine_pid, static_cast<pid_t>(a.engine_pid));
    EXPECT_EQ(harness_.Find("a")->restarts, 0u);
  }
}

// The supervisor ends while engines start; the next one adopts them.
TEST_F(SupervisorTest, SupervisorThatEndsWhileItStartsOrAdoptsEngines) {
  for (const std::string job : {"a", "b", "never-ready"}) {
    harness_.Start();
    const UniqueFd waiting = harness_.Connect();
    ASSERT_TRUE(
        Harness::SendHello(waiting.get(), Harness::GoodHello(job)).ok());
    ASSERT_TRUE(Harness::Eventually(
        [this, &job] { return harness_.Find(job).has_value(); }));
    harness_.Abandon();
    harness_.Start();  // adopts, and ends at once
    harness_.Abandon();
  }
  harness_.Start();
  const TestSession a = MustOpen("a");
  EXPECT_EQ(MustOpen("a").engine_pid, a.engine_pid);
  MustOpen("b");
  EXPECT_EQ(harness_.Find("a")->restarts, 0u);
}

TEST_F(SupervisorTest, EngineThatDiedWithoutASupervisorIsStartedAgain) {
  harness_.Start();
  const TestSession before = MustOpen("keeps");
  harness_.Abandon();
  ASSERT_EQ(::kill(static_cast<pid_t>(before.engine_pid), SIGKILL), 0);
  EXPECT_TRUE(Harness::ClosedByPeer(before.fd.get()));
  harness_.Start();
  const TestSession after = MustOpen("keeps");
  EXPECT_NE(after.engine_pid, before.engine_pid);
  EXPECT_EQ(after.kept, "");  // no supervisor was there to keep them
}

TEST_F(SupervisorTest, AdoptedEngineIsRestartedWhenItDies) {
  harness_.Start();
  MustOpen("a");
  harness_.Abandon();
  harness_.Start();
  const TestSession before = MustOpen("a");
  ASSERT_EQ(::kill(static_cast<pid_t>(before.engine_pid), SIGKILL), 0);
  EXPECT_TRUE(Harness::ClosedByPeer(before.fd.get()));
  EXPECT_NE(MustOpen("a").engine_pid, before.engine_pid);
  EXPECT_EQ(harness_.Find("a")->restarts, 1u);
  // The count is reported by the engine after the adoption.
  harness_.Abandon();
  harness_.Start();
  MustOpen("a");
  EXPECT_EQ(harness_.Find("a")->restarts, 1u);
}

TEST_F(SupervisorTest, SessionsOfAdoptedEnginesEndWhenTheSupervisorSaysSo) {
  harness_.Start();
  const TestSession session = MustOpen("a");
  harness_.Abandon();
  harness_.Start();
  harness_.Stop();
  EXPECT_TRUE(Harness::ClosedByPeer(session.fd.get()));
  EXPECT_EQ(::waitpid(static_cast<pid_t>(session.engine_pid), nullptr, 0), -1)
      << "the engine still runs or was not reaped";
}

TEST_F(SupervisorTest, PrivateEnginesEndWithTheirSupervisor) {
  harness_.set_engines_exit_with_supervisor();
  harness_.Start();
  const TestSession session = MustOpen("a");
  harness_.Abandon();
  EXPECT_TRUE(Harness::ClosedByPeer(session.fd.get()));
  int status = -1;
  EXPECT_EQ(::waitpid(static_cast<pid_t>(session.engine_pid), &status, 0),
            static_cast<pid_t>(session.engine_pid));
  EXPECT_EQ(status, 0);
}

TEST_F(SupervisorTest, KeptGradientsComeBackToTheNextEngine) {
  harness_.Start();
  TestSession first = MustOpen("keeps");
  const TestSession second = MustOpen("keeps");
  const TestSession third = MustOpen("keeps");
  EXPECT_EQ(first.kept, "");
  first.fd.reset();  // rank 0's kept gradients are dropped too
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("keeps")->kept_count == 2; }));
  ASSERT_EQ(::kill(static_cast<pid_t>(second.engine_pid), SIGKILL), 0);
  const std::string kept = "1 101 4096 of rank 1;2 102 4096 of rank 2;";
  EXPECT_TRUE(Harness::ClosedByPeer(second.fd.get()));
  EXPECT_EQ(MustOpen("keeps").kept, kept);
}

TEST_F(SupervisorTest, KeptGradientsComeToTheNextSupervisorToo) {
  harness_.Start();
  const TestSession first = MustOpen("keeps");
  const TestSession second = MustOpen("keeps");
  harness_.Abandon();
  harness_.Start();
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("keeps")->kept_count == 2; }));
  ASSERT_EQ(::kill(static_cast<pid_t>(first.engine_pid), SIGKILL), 0);
  EXPECT_TRUE(Harness::ClosedByPeer(second.fd.get()));
  EXPECT_EQ(MustOpen("keeps").kept,
            "0 100 4096 of rank 0;1 101 4096 of rank 1;");
}

// The engine may die before it has reported to the next supervisor.
TEST_F(SupervisorTest, KeptGradientsOfARunningEngineAreHandedOver) {
  harness_.Start();
  const TestSession session = MustOpen("keeps");
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("keeps")->kept_count == 1; }));
  harness_.HandOverKept();
  harness_.Abandon();
  ASSERT_EQ(::kill(static_cast<pid_t>(session.engine_pid), SIGKILL), 0);
  EXPECT_TRUE(Harness::ClosedByPeer(session.fd.get()));
  harness_.Start();
  EXPECT_EQ(MustOpen("keeps").kept, "0 100 4096 of rank 0;");
}

TEST_F(SupervisorTest, WhatAnAdoptedEngineDoesNotTellOfIsKeptNoLonger) {
  harness_.Start();
  TestSession first = MustOpen("keeps");
  const TestSession second = MustOpen("keeps");
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("keeps")->kept_count == 2; }));
  harness_.HandOverKept();
  harness_.Abandon();
  first.fd.reset();  // the engine has no supervisor to tell
  harness_.Start();
  const TestSession third = MustOpen("keeps");  // the engine is ready
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("keeps")->kept_count == 2; }));
  ASSERT_EQ(::kill(static_cast<pid_t>(third.engine_pid), SIGKILL), 0);
  EXPECT_TRUE(Harness::ClosedByPeer(third.fd.get()));
  EXPECT_EQ(MustOpen("keeps").kept,
            "1 101 4096 of rank 1;2 102 4096 of rank 2;");
}

// An upgrade is the way to repair a job that always fails.
TEST_F(SupervisorTest, KeptGradientsOfAFailedJobAreHandedOver) {
  harness_.config().mutable_engine()->set_restarts_max(0);
  harness_.Start();
  const TestSession session = MustOpen("keeps");
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("keeps")->kept_count == 1; }));
  ASSERT_EQ(::kill(static_cast<pid_t>(session.engine_pid), SIGKILL), 0);
  ASSERT_TRUE(
      Harness::Eventually([this] { return harness_.Find("keeps")->failed; }));
  harness_.HandOverKept();
  harness_.Abandon();
  harness_.Start();
  EXPECT_EQ(MustOpen("keeps").kept, "0 100 4096 of rank 0;");
}

TEST_F(SupervisorTest, EngineOfAnotherControlVersionIsReplaced) {
  harness_.Start();
  const UniqueFd waiting = harness_.Connect();
  ASSERT_TRUE(
      Harness::SendHello(waiting.get(), Harness::GoodHello("foreign")).ok());
  std::set<pid_t> engines;
  ASSERT_TRUE(Harness::Eventually([this, &engines] {
    const auto job = harness_.Find("foreign");
    if (job.has_value() && job->engine_pid != 0) {
      engines.insert(job->engine_pid);
    }
    return engines.size() == 3;
  }));
  std::ofstream(harness_.JobDirectory("foreign") + "/fixed") << "yes";
  EXPECT_TRUE(Harness::ReceiveReply(waiting.get()).ok());
  EXPECT_EQ(harness_.Find("foreign")->restarts, 0u);
}

// Returns the number of memory files that this process has open.
size_t OpenSegments() {
  size_t count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error);
    if (target.string().find("memfd:gradients") != std::string::npos) ++count;
  }
  return count;
}

TEST_F(SupervisorTest, KeptGradientsAreClosedWithTheirJob) {
  harness_.Start();
  const TestSession session = MustOpen("keeps");
  EXPECT_TRUE(Harness::Eventually([] { return OpenSegments() == 1; }));
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.HoldJob("keeps", ::geteuid()).ok());
  ASSERT_TRUE(
      supervisor.DeleteHeldJob("keeps", absl::Now() + Harness::kPatience).ok());
  EXPECT_EQ(OpenSegments(), 0u);
}

TEST_F(SupervisorTest, FailedJobIsRecovered) {
  harness_.config().mutable_engine()->set_restarts_max(1);
  harness_.Start();
  Supervisor& supervisor = harness_.supervisor();
  const auto is_failed = [this] { return harness_.Find("broken")->failed; };
  EXPECT_FALSE(harness_.Open("broken").ok());
  ASSERT_TRUE(is_failed());
  EXPECT_TRUE(absl::IsNotFound(supervisor.RecoverJob("b", ::geteuid(), 0)));
  EXPECT_TRUE(absl::IsPermissionDenied(
      supervisor.RecoverJob("broken", ::geteuid() + 1, 0)));
  // The job is not repaired yet; its count of restarts begins anew, so that it
  // fails the same way again.
  ASSERT_TRUE(supervisor.RecoverJob("broken", ::geteuid(), 0).ok());
  ASSERT_TRUE(Harness::Eventually(is_failed));
  EXPECT_EQ(harness_.Find("broken")->restarts, 1u);

  std::ofstream(harness_.JobDirectory("broken") + "/fixed") << "yes";
  ASSERT_TRUE(supervisor.RecoverJob("broken", ::geteuid(), 0).ok());
  MustOpen("broken");
  EXPECT_EQ(harness_.Find("broken")->restarts, 0u);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      supervisor.RecoverJob("broken", ::geteuid(), 0)));
}

// The next engine may open or find what this one could not.
TEST_F(SupervisorTest, EngineThatRunsAndCallsItsJobFailedIsReplaced) {
  harness_.Start();
  const TestSession before = MustOpen("keeps");
  const auto failed = static_cast<pid_t>(before.engine_pid);
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("keeps")->kept_count == 1; }));
  Supervisor& supervisor = harness_.supervisor();
  EXPECT_TRUE(absl::IsPermissionDenied(
      supervisor.RecoverJob("keeps", ::geteuid() + 1, failed)));
  // The pid is that of another engine, which has gone.
  const absl::Status other =
      supervisor.RecoverJob("keeps", ::geteuid(), failed + 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("has not failed"));
  EXPECT_EQ(MustOpen("keeps").engine_pid, before.engine_pid);

  ASSERT_TRUE(supervisor.RecoverJob("keeps", ::geteuid(), failed).ok());
  EXPECT_TRUE(Harness::ClosedByPeer(before.fd.get()));
  const TestSession after = MustOpen("keeps");
  EXPECT_NE(after.engine_pid, before.engine_pid);
  EXPECT_THAT(after.kept, HasSubstr("0 100 4096 of rank 0;"));
  EXPECT_EQ(harness_.Find("keeps")->restarts, 0u);
}

TEST_F(SupervisorTest, DrainingRefusesNewSessions) {
  harness_.Start();
  const TestSession session = MustOpen("a");
  ASSERT_TRUE(harness_.supervisor().SetDraining(true).ok());
  EXPECT_TRUE(absl::IsUnavailable(harness_.Open("b").status()));
  MustOpen("a");  // perhaps a former rank: its engine knows
  ASSERT_TRUE(harness_.supervisor().SetDraining(false).ok());
  MustOpen("b");
}

TEST_F(SupervisorTest, DeletionWaitsForTheEngineAndRemovesTheState) {
  harness_.Start();
  const TestSession session = MustOpen("a");
  Supervisor& supervisor = harness_.supervisor();
  EXPECT_TRUE(absl::IsNotFound(supervisor.HoldJob("b", ::geteuid())));
  EXPECT_TRUE(
      absl::IsPermissionDenied(supervisor.HoldJob("a", ::geteuid() + 1)));
  ASSERT_TRUE(supervisor.HoldJob("a", ::geteuid()).ok());
  EXPECT_TRUE(absl::IsUnavailable(supervisor.HoldJob("a", ::geteuid())));
  ASSERT_TRUE(
      supervisor.DeleteHeldJob("a", absl::Now() + Harness::kPatience).ok());
  EXPECT_TRUE(Harness::ClosedByPeer(session.fd.get()));
  EXPECT_FALSE(Exists(harness_.JobDirectory("a")));
  EXPECT_FALSE(harness_.Find("a").has_value());
  EXPECT_NE(MustOpen("a").engine_pid, session.engine_pid);
}

TEST_F(SupervisorTest, HeldJobLetsConnectionsGoOnWhenReleased) {
  harness_.Start();
  const TestSession session = MustOpen("a");
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.HoldJob("a", ::geteuid()).ok());
  const UniqueFd late = harness_.Connect();
  ASSERT_TRUE(Harness::SendHello(late.get(), Harness::GoodHello("a")).ok());
  supervisor.ReleaseJob("a");
  const auto reply = Harness::ReceiveReply(late.get());
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->engine_instance(), session.engine_pid);
}

TEST_F(SupervisorTest, FailedJobCanBeDeletedAndMadeAnew) {
  harness_.config().mutable_engine()->set_restarts_max(0);
  harness_.Start();
  EXPECT_FALSE(harness_.Open("dies-at-start").ok());
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.HoldJob("dies-at-start", ::geteuid()).ok());
  ASSERT_TRUE(
      supervisor
          .DeleteHeldJob("dies-at-start", absl::Now() + Harness::kPatience)
          .ok());
  EXPECT_FALSE(Exists(harness_.JobDirectory("dies-at-start")));
}

// The control socket's buffer is limited; the other connections wait, none is
// lost, and other jobs are not delayed.
TEST_F(SupervisorTest, EngineThatDoesNotReadStallsItsJobAlone) {
  harness_.Start();
  std::vector<UniqueFd> fds;
  v1::Hello hello = Harness::GoodHello("deaf");
  for (int i = 0; i < 300; ++i) {
    fds.push_back(harness_.Connect());
    ASSERT_TRUE(Harness::SendHello(fds.back().get(), hello).ok());
  }
  MustOpen("other");
  EXPECT_FALSE(harness_.Find("deaf")->failed);
}

// The connections are those in the control socket, and those waiting for room
// in it.
TEST_F(SupervisorTest, WhoGivesUpBeforeTheEngineReadsIsCountedNoLonger) {
  harness_.config().mutable_limits()->set_sessions_max(400);
  harness_.config().mutable_engine()->set_restarts_max(0);
  harness_.Start();
  const auto sockets = [] { return control::OpenSockets(::getpid())->size(); };
  MustOpen("other");
  const size_t before = sockets();
  std::vector<UniqueFd> fds;
  const v1::Hello hello = Harness::GoodHello("deaf");
  while (!absl::IsResourceExhausted(harness_.Open("other").status())) {
    fds.push_back(harness_.Connect());
    ASSERT_TRUE(Harness::SendHello(fds.back().get(), hello).ok());
  }
  EXPECT_GE(fds.size(), 390u);
  fds.clear();
  EXPECT_TRUE(
      Harness::Eventually([this] { return harness_.Open("other").ok(); }));
  // Clients and daemon share this process; the engine has a few.
  EXPECT_TRUE(Harness::Eventually([&] { return sockets() <= before + 10; }));
  // The engine would not end when it is told to.
  ASSERT_EQ(::kill(harness_.Find("deaf")->engine_pid, SIGKILL), 0);
  EXPECT_TRUE(
      Harness::Eventually([this] { return harness_.Find("deaf")->failed; }));
}

TEST_F(SupervisorTest, WhoGivesUpWhileTheEngineStartsMakesRoomForOthers) {
  harness_.config().mutable_limits()->set_sessions_max(2 *
                                                       JobHost::kWaitingMax);
  harness_.Start();
  const v1::Hello hello = Harness::GoodHello("never-ready");
  for (size_t i = 0; i < JobHost::kWaitingMax + 100; ++i) {
    const UniqueFd gone = harness_.Connect();
    ASSERT_TRUE(Harness::SendHello(gone.get(), hello).ok());
    // At most as many at once as may be in their handshake.
    if (i % 100 == 0) MustOpen("other");
  }
  const UniqueFd late = harness_.Connect();
  ASSERT_TRUE(Harness::SendHello(late.get(), hello).ok());
  MustOpen("other");  // the supervisor has seen them all
  pollfd refused{late.get(), POLLIN | POLLRDHUP, 0};
  EXPECT_EQ(::poll(&refused, 1, 0), 0);
}

TEST_F(SupervisorTest, SessionThatItsEngineClosesEndsForItsPeer) {
  harness_.Start();
  EXPECT_TRUE(Harness::ClosedByPeer(MustOpen("hangs-up").fd.get()));
}

TEST_F(SupervisorTest, FloodBeyondTheFdLimitLeavesAcceptingIntact) {
  harness_.Start();
  TestSession session = MustOpen("a");
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  // Clients and daemon share this process: the remaining fds serve both ends.
  const UniqueFd next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const rlimit tight = {static_cast<rlim_t>(next.get() + 40), limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::vector<UniqueFd> flood;
  while (true) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd.ok()) break;
    flood.push_back(std::move(fd));
  }
  // Sockets are opened first, then connected: each needs an fd on the other
  // side.
  flood.resize(flood.size() - 4);
  const std::string path = harness_.socket();
  for (const UniqueFd& fd : flood) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    (void)::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                    sizeof(address));
  }
  // Connections without a place are refused and closed.
  EXPECT_TRUE(Harness::ClosedByPeer(flood.back().get()));
  const auto refused = Harness::ReceiveReply(flood.back().get());
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  flood.clear();
  EXPECT_TRUE(Harness::Eventually([this] { return harness_.Open("a").ok(); }));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// The job has no state that could be lost.
TEST_F(SupervisorTest, JobWhoseEngineFindsNoFdsIsRefusedAndGoes) {
  harness_.Start();
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const UniqueFd next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const rlimit tight = {static_cast<rlim_t>(next.get() + 40), limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::vector<UniqueFd> taken;
  do {
    taken.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  } while (taken.back().ok());
  // The freed fds serve both ends of the connection, and one the job's files.
  taken.resize(taken.size() - 4);
  const absl::Status status = harness_.Open("a").status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("Too many open files"), HasSubstr("ulimit -n")));
  EXPECT_TRUE(
      Harness::Eventually([this] { return !harness_.Find("a").has_value(); }));
  taken.clear();
  EXPECT_NE(MustOpen("a").engine_pid, 0u);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_F(SupervisorTest, JobWithStateThatFindsNoFdsIsKept) {
  harness_.config().mutable_engine()->set_restarts_max(1);
  harness_.Start();
  const auto engine = static_cast<pid_t>(MustOpen("a").engine_pid);
  const std::string state = harness_.JobDirectory("a") + "/state";
  ASSERT_TRUE(std::filesystem::create_directory(state));
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {0, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  ASSERT_EQ(::kill(engine, SIGKILL), 0);
  EXPECT_TRUE(
      Harness::Eventually([this] { return harness_.Find("a")->failed; }));
  EXPECT_TRUE(Exists(state));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_THAT(harness_.Find("a")->reason, HasSubstr("Too many open files"));
}

TEST_F(SupervisorTest, AnotherUsersJobIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  ASSERT_EQ(::chmod(harness_.config().state_dir().c_str(), 0755), 0);
  harness_.Start();
  MustOpen("roots");
  const auto as_user = [this](const std::string& job) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setuid(4711) != 0) ::_exit(100);
      ::_exit(static_cast<int>(harness_.Open(job).status().code()));
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return static_cast<absl::StatusCode>(WEXITSTATUS(status));
  };
  EXPECT_EQ(as_user("roots"), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(as_user("users"), absl::StatusCode::kOk);
  EXPECT_EQ(harness_.Find("users")->uid, 4711u);
  MustOpen("users");  // root may
}

}  // namespace
}  // namespace optstate::supervisor
