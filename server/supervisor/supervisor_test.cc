#include "server/supervisor/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/unique_fd.h"
#include "server/supervisor/core_shares.h"
#include "server/supervisor/supervisor_fixture.h"
#include "server/supervisor/supervisor_harness.h"

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Harness = SupervisorHarness;

// A user that is certainly neither root nor the one of this test.
constexpr uid_t kOtherUid = 4711;

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

TEST_F(SupervisorTest, FailedJobIsRecovered) {
  harness_.config().mutable_engine()->set_restarts_max(1);
  harness_.Start();
  Supervisor& supervisor = harness_.supervisor();
  const auto is_failed = [this] { return harness_.Find("broken")->failed; };
  EXPECT_FALSE(harness_.Open("broken").ok());
  ASSERT_TRUE(is_failed());
  EXPECT_TRUE(absl::IsNotFound(supervisor.RecoverJob(
      "b", access::UnixCaller(::geteuid()), 0, /*to_durable=*/false)));
  EXPECT_TRUE(absl::IsPermissionDenied(supervisor.RecoverJob(
      "broken", access::UnixCaller(kOtherUid), 0, /*to_durable=*/false)));
  // The job is not repaired yet; its count of restarts begins anew, so that it
  // fails the same way again.
  ASSERT_TRUE(supervisor
                  .RecoverJob("broken", access::UnixCaller(::geteuid()), 0,
                              /*to_durable=*/false)
                  .ok());
  ASSERT_TRUE(Harness::Eventually(is_failed));
  EXPECT_EQ(harness_.Find("broken")->restarts, 1u);

  std::ofstream(harness_.JobDirectory("broken") + "/fixed") << "yes";
  ASSERT_TRUE(supervisor
                  .RecoverJob("broken", access::UnixCaller(::geteuid()), 0,
                              /*to_durable=*/false)
                  .ok());
  MustOpen("broken");
  EXPECT_EQ(harness_.Find("broken")->restarts, 0u);
  EXPECT_TRUE(absl::IsFailedPrecondition(supervisor.RecoverJob(
      "broken", access::UnixCaller(::geteuid()), 0, /*to_durable=*/false)));
}

// The next engine may open or find what this one could not.
TEST_F(SupervisorTest, EngineThatRunsAndCallsItsJobFailedIsReplaced) {
  harness_.Start();
  const TestSession before = MustOpen("keeps");
  const auto failed = static_cast<pid_t>(before.engine_pid);
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("keeps")->kept_count == 1; }));
  Supervisor& supervisor = harness_.supervisor();
  EXPECT_TRUE(absl::IsPermissionDenied(supervisor.RecoverJob(
      "keeps", access::UnixCaller(kOtherUid), failed, /*to_durable=*/false)));
  // The pid is that of another engine, which has gone.
  const absl::Status other =
      supervisor.RecoverJob("keeps", access::UnixCaller(::geteuid()),
                            failed + 1, /*to_durable=*/false);
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("has not failed"));
  EXPECT_EQ(MustOpen("keeps").engine_pid, before.engine_pid);

  ASSERT_TRUE(supervisor
                  .RecoverJob("keeps", access::UnixCaller(::geteuid()), failed,
                              /*to_durable=*/false)
                  .ok());
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
  EXPECT_TRUE(absl::IsNotFound(
      supervisor.HoldJob("b", access::UnixCaller(::geteuid()))));
  EXPECT_TRUE(absl::IsPermissionDenied(
      supervisor.HoldJob("a", access::UnixCaller(kOtherUid))));
  ASSERT_TRUE(supervisor.HoldJob("a", access::UnixCaller(::geteuid())).ok());
  EXPECT_TRUE(absl::IsUnavailable(
      supervisor.HoldJob("a", access::UnixCaller(::geteuid()))));
  ASSERT_TRUE(
      supervisor.DeleteHeldJob("a", absl::Now() + Harness::kPatience).ok());
  EXPECT_TRUE(Harness::ClosedByPeer(session.fd.get()));
  EXPECT_FALSE(Exists(harness_.JobDirectory("a")));
  EXPECT_FALSE(harness_.Find("a").has_value());
  EXPECT_NE(MustOpen("a").engine_pid, session.engine_pid);
}

// The caller sees what it waits for, and how much is removed.
TEST_F(SupervisorTest, ADeletionSaysHowFarItIs) {
  harness_.Start();
  const auto engine = static_cast<pid_t>(MustOpen("a").engine_pid);
  std::ofstream(harness_.JobDirectory("a") + "/file")
      << std::string(100'000, 'x');
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.HoldJob("a", access::UnixCaller(::geteuid())).ok());
  ASSERT_EQ(::kill(engine, SIGSTOP), 0);  // it cannot end
  const auto deletion = supervisor.BeginDeletion("a");
  EXPECT_FALSE(deletion->AwaitEnd(absl::InfinitePast()));
  EXPECT_TRUE(deletion->progress().awaits_engine());
  EXPECT_FALSE(deletion->progress().done());
  ASSERT_EQ(::kill(engine, SIGCONT), 0);
  ASSERT_TRUE(deletion->AwaitEnd(absl::Now() + Harness::kPatience));
  EXPECT_TRUE(deletion->status().ok()) << deletion->status();
  EXPECT_TRUE(deletion->progress().done());
  EXPECT_FALSE(deletion->progress().awaits_engine());
  EXPECT_GT(deletion->progress().bytes_total(), 0u);
  EXPECT_EQ(deletion->progress().bytes(), deletion->progress().bytes_total());
  EXPECT_FALSE(Exists(harness_.JobDirectory("a")));
}

// A job may end by itself while it is held, and another user take its name.
TEST_F(SupervisorTest, WhatIsDeletedIsTheJobThatWasHeld) {
  harness_.Start();
  TestSession session = MustOpen("one-session");
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(
      supervisor.HoldJob("one-session", access::UnixCaller(::geteuid())).ok());
  session.fd.reset();
  ASSERT_TRUE(Harness::Eventually(
      [this] { return !harness_.Find("one-session").has_value(); }));
  const TestSession next = MustOpen("one-session");
  EXPECT_TRUE(
      supervisor.DeleteHeldJob("one-session", absl::Now() + Harness::kPatience)
          .ok());
  EXPECT_TRUE(absl::IsNotFound(
      supervisor.PutToSleep("one-session", static_cast<pid_t>(next.engine_pid))
          .status()));
  const auto found = harness_.Find("one-session");
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(static_cast<uint64_t>(found->engine_pid), next.engine_pid);
}

// Somebody else deletes the job that has taken the name.
TEST_F(SupervisorTest, ADeletionIsNotTakenFromWhoHasBegunIt) {
  harness_.Start();
  const auto engine = static_cast<pid_t>(MustOpen("a").engine_pid);
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.HoldJob("a", access::UnixCaller(::geteuid())).ok());
  ASSERT_EQ(::kill(engine, SIGSTOP), 0);  // it cannot end
  const auto deletion = supervisor.BeginDeletion("a");
  const auto late = supervisor.BeginDeletion("a");
  EXPECT_TRUE(late->AwaitEnd(absl::InfinitePast()));
  EXPECT_FALSE(deletion->AwaitEnd(absl::InfinitePast()));
  ASSERT_EQ(::kill(engine, SIGCONT), 0);
  ASSERT_TRUE(deletion->AwaitEnd(absl::Now() + Harness::kPatience));
  EXPECT_TRUE(deletion->status().ok()) << deletion->status();
}

// The daemon ends between the hold and the deletion.
TEST_F(SupervisorTest, ADeletionThatComesTooLateIsNone) {
  harness_.Start();
  MustOpen("a");
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.HoldJob("a", access::UnixCaller(::geteuid())).ok());
  harness_.StopEngines();
  const auto deletion = supervisor.BeginDeletion("a");
  ASSERT_TRUE(deletion->AwaitEnd(absl::InfinitePast()));
  EXPECT_TRUE(absl::IsUnavailable(deletion->status())) << deletion->status();
  EXPECT_FALSE(deletion->progress().done());
  EXPECT_TRUE(Exists(harness_.JobDirectory("a")));
  harness_.Stop();
  harness_.Start();
  EXPECT_TRUE(harness_.Find("a").has_value());
}

TEST_F(SupervisorTest, HeldJobLetsConnectionsGoOnWhenReleased) {
  harness_.Start();
  const TestSession session = MustOpen("a");
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.HoldJob("a", access::UnixCaller(::geteuid())).ok());
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
  ASSERT_TRUE(
      supervisor.HoldJob("dies-at-start", access::UnixCaller(::geteuid()))
          .ok());
  ASSERT_TRUE(
      supervisor
          .DeleteHeldJob("dies-at-start", absl::Now() + Harness::kPatience)
          .ok());
  EXPECT_FALSE(Exists(harness_.JobDirectory("dies-at-start")));
}

TEST_F(SupervisorTest, SessionThatItsEngineClosesEndsForItsPeer) {
  harness_.Start();
  EXPECT_TRUE(Harness::ClosedByPeer(MustOpen("hangs-up").fd.get()));
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
