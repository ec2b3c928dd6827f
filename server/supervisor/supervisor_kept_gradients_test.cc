// Gradients that the supervisor keeps for the next engine of a job.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "absl/time/clock.h"
#include "server/supervisor/supervisor.h"
#include "server/supervisor/supervisor_fixture.h"
#include "server/supervisor/supervisor_harness.h"

namespace optstate::supervisor {
namespace {

using Harness = SupervisorHarness;
using SupervisorKeptGradientsTest = SupervisorTest;

TEST_F(SupervisorKeptGradientsTest, KeptGradientsComeBackToTheNextEngine) {
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

TEST_F(SupervisorKeptGradientsTest, KeptGradientsComeToTheNextSupervisorToo) {
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
TEST_F(SupervisorKeptGradientsTest,
       KeptGradientsOfARunningEngineAreHandedOver) {
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

TEST_F(SupervisorKeptGradientsTest,
       WhatAnAdoptedEngineDoesNotReportIsKeptNoLonger) {
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
TEST_F(SupervisorKeptGradientsTest, KeptGradientsOfAFailedJobAreHandedOver) {
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

TEST_F(SupervisorKeptGradientsTest, KeptGradientsAreClosedWithTheirJob) {
  harness_.Start();
  const TestSession session = MustOpen("keeps");
  EXPECT_TRUE(Harness::Eventually([] { return OpenSegments() == 1; }));
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(
      supervisor.HoldJob("keeps", access::UnixCaller(::geteuid())).ok());
  ASSERT_TRUE(
      supervisor.DeleteHeldJob("keeps", absl::Now() + Harness::kPatience).ok());
  EXPECT_EQ(OpenSegments(), 0u);
}

}  // namespace
}  // namespace optstate::supervisor
