// Engines that outlive their supervisor, and the supervisor that comes next.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <fstream>
#include <set>
#include <string>

#include "proto/types/unique_fd.h"
#include "server/supervisor/core_shares.h"
#include "server/supervisor/supervisor_fixture.h"
#include "server/supervisor/supervisor_harness.h"

namespace optstate::supervisor {
namespace {

using Harness = SupervisorHarness;
using SupervisorAdoptionTest = SupervisorTest;

// An engine's weight is given by its present supervisor.
TEST_F(SupervisorAdoptionTest, AdoptedEnginesGetTheShareOfTheirJob) {
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

TEST_F(SupervisorAdoptionTest, JobsAreThereAgainAfterARestart) {
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

TEST_F(SupervisorAdoptionTest, EnginesOutliveTheirSupervisorAndAreAdopted) {
  harness_.Start();
  const TestSession a = MustOpen("a");
  const TestSession b = MustOpen("b");
  // The supervisor is replaced twice in a row.
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
TEST_F(SupervisorAdoptionTest, SupervisorThatEndsWhileItStartsOrAdoptsEngines) {
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

TEST_F(SupervisorAdoptionTest, EngineThatDiedWithoutASupervisorIsStartedAgain) {
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

TEST_F(SupervisorAdoptionTest, AdoptedEngineIsRestartedWhenItDies) {
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

TEST_F(SupervisorAdoptionTest,
       SessionsOfAdoptedEnginesEndWhenTheSupervisorSaysSo) {
  harness_.Start();
  const TestSession session = MustOpen("a");
  harness_.Abandon();
  harness_.Start();
  harness_.Stop();
  EXPECT_TRUE(Harness::ClosedByPeer(session.fd.get()));
  EXPECT_EQ(::waitpid(static_cast<pid_t>(session.engine_pid), nullptr, 0), -1)
      << "the engine still runs or was not reaped";
}

TEST_F(SupervisorAdoptionTest, PrivateEnginesEndWithTheirSupervisor) {
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

TEST_F(SupervisorAdoptionTest, EngineOfAnotherControlVersionIsReplaced) {
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

}  // namespace
}  // namespace optstate::supervisor
