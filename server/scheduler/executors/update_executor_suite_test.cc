// Runs the suite with each executor, and tests what only one of them does.

#include "server/scheduler/executors/update_executor_suite.h"

#include <atomic>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/executors/fake_update_executor.h"

namespace optstate::scheduler {
namespace {

std::unique_ptr<UpdateExecutor> MakeCpu(WorkerPool* pool,
                                        absl::Span<WorkerUndo> undo) {
  return std::make_unique<CpuUpdateExecutor>(pool, undo, /*observer=*/nullptr);
}

template <uint64_t kSeed>
std::unique_ptr<UpdateExecutor> MakeFake(WorkerPool* /*pool*/,
                                         absl::Span<WorkerUndo> undo) {
  return std::make_unique<FakeUpdateExecutor>(undo.data(), kSeed);
}

INSTANTIATE_TEST_SUITE_P(
    Executors, UpdateExecutorSuite,
    testing::Values(UpdateExecutorParam{"Cpu1", 1, MakeCpu},
                    UpdateExecutorParam{"Cpu3", 3, MakeCpu},
                    UpdateExecutorParam{"Fake1", 1, MakeFake<1>},
                    UpdateExecutorParam{"Fake2", 1, MakeFake<2>},
                    UpdateExecutorParam{"Fake3", 1, MakeFake<3>}),
    [](const auto& tested) { return tested.param.name; });

TEST(FakeUpdateExecutorTest, AnInjectedErrorLeavesWholeTasksUndone) {
  WorkerUndo undo = {};
  FakeUpdateExecutor executor(&undo, /*seed=*/4);
  WatchedUpdates updates(executor.slots());
  executor.FailAfter(20, absl::UnavailableError("injected"));
  constexpr size_t kPositions = WatchedUpdates::kPositions;
  EXPECT_EQ(executor.Update({0, kPositions, kPositions}, &updates).message(),
            "injected");
  EXPECT_EQ(updates.open_slots(), 0u);
  size_t stamped = 0;
  for (size_t run = 0; run < kPositions * WatchedUpdates::kRuns; ++run) {
    stamped += updates.IsStamped(run) ? 1 : 0;
  }
  EXPECT_EQ(stamped, 20u);
  updates.CheckValues();
}

// A kernel that only looks at what it was given.
class Looking {
 public:
  static inline WorkerUndo* undo = nullptr;
  static inline std::atomic<uint64_t>* stamp = nullptr;
  static inline int calls = 0;

  static void Apply(const kernels::UpdateFactors& /*factors*/,
                    const kernels::TileView& view) {
    ++calls;
    EXPECT_EQ(view.undo, &undo->slot);
    EXPECT_EQ(undo->kind.load(), static_cast<uint64_t>(UndoKind::kUpdate));
    EXPECT_EQ(undo->run, 12u);
    EXPECT_EQ(undo->stamp, 34u);
    EXPECT_EQ(stamp->load(), 0u);
  }
};

TEST(CpuUpdateExecutorTest, TheSlotNamesTheRunThatTheKernelWrites) {
  class OneTask final : public UpdateTasks {
   public:
    absl::Status Open(size_t, size_t) override { return absl::OkStatus(); }
    void ForEachTask(size_t,
                     absl::FunctionRef<void(UpdateTask&)> visit) override {
      kernels::UpdateKernel kernel;
      kernel.apply = Looking::Apply;
      const kernels::UpdateFactors factors;
      UpdateTask task;
      task.run = 12;
      task.step = 34;
      task.kernel = &kernel;
      task.factors = &factors;
      task.stamp = Looking::stamp;
      visit(task);
      EXPECT_EQ(Looking::stamp->load(), 34u);
    }
    void Close(size_t) override {}
  };
  WorkerPool pool(1, /*spin=*/false);
  std::vector<WorkerUndo> undo(1);
  std::atomic<uint64_t> stamp{0};
  Looking::undo = undo.data();
  Looking::stamp = &stamp;
  Looking::calls = 0;
  CpuUpdateExecutor executor(&pool, absl::MakeSpan(undo), nullptr);
  OneTask task;
  EXPECT_TRUE(executor.Update({0, 1, 1}, &task).ok());
  EXPECT_EQ(Looking::calls, 1);
  EXPECT_EQ(undo[0].kind.load(), static_cast<uint64_t>(UndoKind::kNone));
}

TEST(CpuUpdateExecutorTest, AnObserverHearsOfEachRunWhenItIsStamped) {
  class Observer final : public StepObserver {
   public:
    explicit Observer(const WatchedUpdates* updates) : updates_(*updates) {}
    void OnRunUpdated(uint64_t step, uint64_t run) override {
      EXPECT_EQ(step, WatchedUpdates::kStep);
      EXPECT_TRUE(updates_.IsStamped(run));
      ++runs;
    }
    std::atomic<size_t> runs{0};

   private:
    const WatchedUpdates& updates_;
  };
  WorkerPool pool(2, /*spin=*/false);
  std::vector<WorkerUndo> undo(2);
  WatchedUpdates updates(2);
  Observer observer(&updates);
  CpuUpdateExecutor executor(&pool, absl::MakeSpan(undo), &observer);
  constexpr size_t kPositions = WatchedUpdates::kPositions;
  ASSERT_TRUE(executor.Update({0, kPositions, kPositions}, &updates).ok());
  EXPECT_EQ(observer.runs, kPositions * WatchedUpdates::kRuns);
}

}  // namespace
}  // namespace optstate::scheduler
