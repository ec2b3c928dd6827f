#include "server/scheduler/passes/speculation.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/passes/updater.h"
#include "server/scheduler/scheduler_test_job.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kStep = 8;

struct Speculated {
  explicit Speculated(const SchedulerTestJob::Setup& setup)
      : job(setup),
        executor(&job.pool(), job.memory().undo, nullptr),
        counts(&job.plan(), &job.memory()),
        speculation(&job.plan(), &job.memory(), &job.pool()),
        updater(&job.plan(), &job.memory(), &executor, &counts, &speculation) {}
  void Speculate(uint64_t step) {
    StepUpdate update = job.UpdateOf(step);
    update.speculative = true;
    speculation.Begin(step);
    EXPECT_TRUE(updater.MakePass(update).ok());
  }

  SchedulerTestJob job;
  CpuUpdateExecutor executor;
  StepCounts counts;
  Speculation speculation;
  Updater updater;
};

TEST(SpeculationTest, RollsBackAllFormats) {
  for (const StateFormat state : {StateFormat::kFloat32, StateFormat::kBFloat16,
                                  StateFormat::kDynamic8}) {
    for (const MasterFormat master :
         {MasterFormat::kFloat32, MasterFormat::kSplit}) {
      Speculated it({.state = state, .master = master});
      // State that is not all zeros.
      ASSERT_TRUE(it.updater.MakePass(it.job.UpdateOf(kStep - 1)).ok());
      const std::vector<std::byte> before = it.job.State();
      it.Speculate(kStep);
      EXPECT_NE(it.job.State(), before);
      EXPECT_EQ(it.job.control().step_speculated.load(), kStep);
      ASSERT_TRUE(it.speculation.RollBack(kStep).ok());
      EXPECT_EQ(it.job.State(), before);
      EXPECT_EQ(it.job.control().step_speculated.load(), 0u);
      for (const auto& stamp : it.job.run_stamps()) EXPECT_EQ(stamp.load(), 0u);
    }
  }
}

TEST(SpeculationTest, RunsThatWereNotSpeculatedAboutStay) {
  Speculated it({});
  std::vector<uint8_t> updated(it.job.layout().parameters().size(), 0);
  updated[3] = 1;
  it.job.SetUpdated(updated);
  it.Speculate(kStep);
  std::memset(it.job.RecordOf(0, 0).parameter(0, 0), 7, 40);
  ASSERT_TRUE(it.speculation.RollBack(kStep).ok());
  const std::vector<std::byte> restored = it.job.State();
  EXPECT_EQ(it.job.RecordOf(0, 0).parameter(0, 0)[39], std::byte{7});
  // Nothing is kept any more.
  it.job.RecordOf(3, 0).parameter(3, 0)[0] ^= std::byte{1};
  const std::vector<std::byte> changed = it.job.State();
  EXPECT_NE(changed, restored);
  ASSERT_TRUE(it.speculation.RollBack(kStep).ok());
  EXPECT_EQ(it.job.State(), changed);
}

TEST(SpeculationTest, AnUpdateInFlightIsDroppedAndASumIsNot) {
  Speculated it({});
  it.job.undo(0).Begin(UndoKind::kUpdate, 0, kStep);
  it.job.undo(1).Begin(UndoKind::kAccumulate, 0, 77);
  ASSERT_TRUE(it.speculation.RollBack(kStep).ok());
  EXPECT_EQ(it.job.undo(0).kind.load(), 0u);
  EXPECT_EQ(it.job.undo(1).kind.load(),
            static_cast<uint64_t>(UndoKind::kAccumulate));
}

TEST(SpeculationTest, OnlySeparableUpdatesAreSpeculatedWith) {
  EXPECT_TRUE(Speculation::CanSpeculate(SchedulerTestJob({}).layout()));
  EXPECT_FALSE(Speculation::CanSpeculate(
      SchedulerTestJob({.optimizer = OptimizerKind::kLamb}).layout()));
}

}  // namespace
}  // namespace optstate::scheduler
