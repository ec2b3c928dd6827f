// The kernel takes an engine for want of memory: it sends SIGKILL, as this
// does.

#include <memory>

#include "gtest/gtest.h"
#include "tests/faults/fault_fixture.h"

namespace optstate::faults {
namespace {

class EngineOomTest : public WireFaultTest {};

TEST_P(EngineOomTest, StepIsFinishedByTheNextEngine) {
  layout_ = LargeLayout();
  StartDaemon({.tcp = false, .flags = {}, .config = OneWorker()});
  ASSERT_FALSE(HasFatalFailure());
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  uint64_t last = 0;
  KillEngineInsideStep(*session, 1, &last);
  RunSteps(*session, last + 1, last + 1);
  ExpectUndisturbed(*session, last + 1);
  EXPECT_EQ(
      TimesLogged("killed by signal 9 (Killed), perhaps for memory: see dmesg"),
      1);
  EXPECT_EQ(TimesLogged("step finished after a crash: job=job"), 1);
  const auto job = daemon_->GetJob("job");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->engine_restarts(), 1);
}

INSTANTIATE_TEST_SUITE_P(Wires, EngineOomTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate::faults
