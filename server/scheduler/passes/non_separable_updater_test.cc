#include "server/scheduler/passes/non_separable_updater.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/scheduler_test_job.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kStep = 3;

struct Updates {
  explicit Updates(const SchedulerTestJob::Setup& setup)
      : job(setup),
        executor(&job.pool(), job.memory().undo, nullptr),
        counts(&job.plan(), &job.memory()),
        updater(&job.plan(), &job.memory(), &job.pool(), &executor, &counts,
                nullptr) {
    EXPECT_TRUE(updater.Init().ok());
  }

  SchedulerTestJob job;
  CpuUpdateExecutor executor;
  StepCounts counts;
  NonSeparableUpdater updater;
};

constexpr OptimizerKind kKinds[] = {
    OptimizerKind::kLamb, OptimizerKind::kAdafactor, OptimizerKind::kMuon};

TEST(NonSeparableUpdaterTest, BitsAreIndependentOfWorkers) {
  for (const OptimizerKind kind : kKinds) {
    const SchedulerTestJob::Setup setup = {.optimizer = kind,
                                           .state = StateFormat::kBFloat16,
                                           .master = MasterFormat::kSplit,
                                           .workers = 1};
    SchedulerTestJob::Setup three = setup;
    three.workers = 3;
    Updates one(setup);
    Updates several(three);
    const std::vector<std::byte> before = one.job.State();
    ASSERT_TRUE(one.updater.MakePass(one.job.UpdateOf(kStep)).ok());
    ASSERT_TRUE(several.updater.MakePass(several.job.UpdateOf(kStep)).ok());
    EXPECT_NE(one.job.State(), before);
    EXPECT_EQ(one.job.State(), several.job.State());
    for (uint32_t p = 0; p < one.job.layout().parameters().size(); ++p) {
      EXPECT_TRUE(one.updater.IsUpdated(p, kStep));
    }
  }
}

TEST(NonSeparableUpdaterTest, ParametersThatHaveTheStepAreLeftAlone) {
  Updates updates({.optimizer = OptimizerKind::kLamb});
  ASSERT_TRUE(updates.updater.MakePass(updates.job.UpdateOf(kStep)).ok());
  const std::vector<std::byte> before = updates.job.State();
  ASSERT_TRUE(updates.updater.MakePass(updates.job.UpdateOf(kStep)).ok());
  EXPECT_EQ(updates.job.State(), before);
  ASSERT_TRUE(updates.updater.MakePass(updates.job.UpdateOf(kStep + 1)).ok());
  EXPECT_NE(updates.job.State(), before);
}

// The values of a replacement depend on `redo` and the step alone, so that a
// process that is killed while it installs them leaves nothing that counts.
TEST(NonSeparableUpdaterTest, PuttingInPlaceIsIdempotent) {
  for (const OptimizerKind kind : kKinds) {
    Updates updates(
        {.optimizer = kind, .state = StateFormat::kBFloat16, .workers = 1});
    SchedulerTestJob& job = updates.job;
    std::vector<uint8_t> updated(job.layout().parameters().size(), 0);
    updated[3] = 1;  // bfloat16, with a master beside it
    job.SetUpdated(updated);
    ASSERT_TRUE(updates.updater.MakePass(job.UpdateOf(kStep)).ok());
    const std::vector<std::byte> done = job.State();
    const uint64_t first = job.layout().first_run(3);
    const storage::RecordView record = job.RecordOf(3, 0);
    std::memset(record.master(3, 5), 0xAB, 100);
    std::memset(record.parameter(3, 5), 0xAB, 100);
    job.undo(0).Begin(UndoKind::kReplace, first, kStep);
    updates.updater.PutInPlace(record, &job.undo(0));
    EXPECT_EQ(job.State(), done);
    EXPECT_EQ(job.undo(0).kind.load(), 0u);
  }
}

TEST(NonSeparableUpdaterTest, FilesHaveRoomForTheLargestParameter) {
  const SchedulerTestJob lamb({.optimizer = OptimizerKind::kLamb});
  const uint64_t part = NonSeparableUpdater::RedoBytes(lamb.layout(), 1);
  // A master and two arrays of floats, each a multiple of 64 bytes.
  EXPECT_EQ(part, uint64_t{3 * (100 * 130 * 4 + 32)});
  EXPECT_EQ(NonSeparableUpdater::RedoBytes(lamb.layout(), 5), 5 * part);
  EXPECT_GE(NonSeparableUpdater::WorkspaceBytes(lamb.layout(), 2),
            uint64_t{2 * 100 * 130 * 4});
  std::vector<WorkerUndo> undo(3);
  const absl::Span<const std::byte> bytes(
      reinterpret_cast<const std::byte*>(undo.data()),
      undo.size() * sizeof(WorkerUndo));
  EXPECT_EQ(NonSeparableUpdater::RedoBytesInUse(lamb.layout(), bytes), 0u);
  undo[1].Begin(UndoKind::kReplace, 0, kStep);
  EXPECT_EQ(NonSeparableUpdater::RedoBytesInUse(lamb.layout(), bytes),
            2 * part);

  const SchedulerTestJob adamw({});
  EXPECT_EQ(NonSeparableUpdater::RedoBytes(adamw.layout(), 5), 0u);
  EXPECT_EQ(NonSeparableUpdater::RedoBytesInUse(adamw.layout(), bytes), 0u);
  EXPECT_EQ(NonSeparableUpdater::WorkspaceBytes(adamw.layout(), 5), 0u);
}

}  // namespace
}  // namespace optstate::scheduler
