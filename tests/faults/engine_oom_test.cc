// The kernel kills an engine for want of memory: by itself, or as this test
// does, which sends the same SIGKILL at an instant of its choice.

#include <cstdint>
#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "tests/faults/fault_fixture.h"
#include "tests/faults/memory_group.h"

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

// A new session takes some memory of its engine, a thread's stack at least:
// here more than the engine's group has left. The next engine is in no such
// group.
class MemoryGroupTest : public FaultTest {
 protected:
  static constexpr uint64_t kBytesLeft = 16 << 10;

  // A group goes away when its processes have.
  void TearDown() override {
    FaultTest::TearDown();
    daemon_.reset();
    group_.reset();
  }

  std::unique_ptr<MemoryGroup> group_;
};

TEST_F(MemoryGroupTest, SessionIsServedByTheNextEngine) {
  auto group = MemoryGroup::Make(kBytesLeft);
  if (absl::IsUnavailable(group.status())) GTEST_SKIP() << group.status();
  ASSERT_TRUE(group.ok()) << group.status();
  group_ = *std::move(group);
  layout_ = LargeLayout();
  StartDaemon({.tcp = false, .flags = {}, .config = OneWorker()});
  ASSERT_FALSE(HasFatalFailure());
  auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  RunSteps(*session, 1, 2);
  session.reset();

  ASSERT_TRUE(group_->Add(engine()).ok());
  session = Open(Options());
  ASSERT_NE(session, nullptr);
  RunSteps(*session, 3, 4);
  ExpectUndisturbed(*session, 4);
  const auto kills = group_->Kills();
  ASSERT_TRUE(kills.ok()) << kills.status();
  EXPECT_EQ(*kills, 1);
  EXPECT_EQ(
      TimesLogged("killed by signal 9 (Killed), perhaps for memory: see dmesg"),
      1);
}

INSTANTIATE_TEST_SUITE_P(Wires, EngineOomTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate::faults
