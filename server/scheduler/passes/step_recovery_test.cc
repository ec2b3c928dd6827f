#include "server/scheduler/passes/step_recovery.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reduce.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/passes/updater.h"
#include "server/scheduler/scheduler_test_job.h"
#include "storage/format/rank_mark.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kStep = 6;

struct Recovered {
  explicit Recovered(const SchedulerTestJob::Setup& setup)
      : job(setup),
        executor(&job.pool(), job.memory().undo, nullptr),
        counts(&job.plan(), &job.memory()),
        speculation(&job.plan(), &job.memory(), &job.pool()),
        sums_of_squares(job.layout().run_count(), -1) {
    if (job.plan().non_separable_kernel() != nullptr) {
      non_separable = std::make_unique<NonSeparableUpdater>(
          &job.plan(), &job.memory(), &job.pool(), &executor, &counts, nullptr);
      EXPECT_TRUE(non_separable->Init().ok());
    } else {
      updater = std::make_unique<Updater>(&job.plan(), &job.memory(), &executor,
                                          &counts, &speculation);
    }
    recovery = std::make_unique<StepRecovery>(
        &job.plan(), &job.memory(), &executor, &counts, non_separable.get(),
        absl::MakeSpan(sums_of_squares), nullptr);
  }
  absl::Status Finish() {
    const StepUpdate update = job.UpdateOf(kStep);
    const absl::Status finished = recovery->FinishRunsInFlight(update);
    if (!finished.ok()) return finished;
    return non_separable != nullptr ? non_separable->MakePass(update)
                                    : updater->MakePass(update);
  }

  SchedulerTestJob job;
  CpuUpdateExecutor executor;
  StepCounts counts;
  Speculation speculation;
  std::vector<double> sums_of_squares;
  std::unique_ptr<NonSeparableUpdater> non_separable;
  std::unique_ptr<Updater> updater;
  std::unique_ptr<StepRecovery> recovery;
};

TEST(StepRecoveryTest, ARunInFlightIsFinishedAndNotDoneTwice) {
  Recovered killed({});
  Recovered plain({});
  // A worker was killed between Begin() and the first vector.
  killed.job.undo(1).Begin(UndoKind::kUpdate, 2, kStep);
  EXPECT_EQ(*killed.recovery->RollBack(kStep), 1u);
  ASSERT_TRUE(
      killed.recovery->FinishRunsInFlight(killed.job.UpdateOf(kStep)).ok());
  EXPECT_EQ(killed.job.run_stamps()[2].load(), kStep);
  EXPECT_EQ(killed.job.run_stamps()[1].load(), 0u);
  ASSERT_TRUE(killed.Finish().ok());
  ASSERT_TRUE(plain.Finish().ok());
  EXPECT_EQ(killed.job.State(), plain.job.State());
  EXPECT_EQ(*killed.recovery->RollBack(kStep), 0u);
}

// A kernel was killed behind its first 64 elements, which have their new
// values.
TEST(StepRecoveryTest, ARunInFlightGoesOnWhereItsSlotSays) {
  constexpr size_t kDone = 64;
  Recovered killed({});
  Recovered plain({});
  ASSERT_TRUE(plain.Finish().ok());
  const uint64_t begin = 2 * kTileElements;  // of run 2
  const storage::RecordView done = plain.job.RecordOf(0, begin);
  const storage::RecordView half = killed.job.RecordOf(0, begin);
  constexpr size_t kBytes = kDone * sizeof(float);
  std::memcpy(half.master(0, begin), done.master(0, begin), kBytes);
  for (int k = 0; k < 2; ++k) {
    std::memcpy(half.state(k, 0, begin), done.state(k, 0, begin), kBytes);
  }
  WorkerUndo& undo = killed.job.undo(0);
  undo.Begin(UndoKind::kUpdate, 2, kStep);
  undo.slot.progress = kernels::UndoProgress(kDone);
  EXPECT_EQ(*killed.recovery->RollBack(kStep), 1u);
  ASSERT_TRUE(killed.Finish().ok());
  EXPECT_EQ(killed.job.State(), plain.job.State());
}

TEST(StepRecoveryTest, ASlotOfARunThatIsDoneIsCleared) {
  Recovered killed({});
  killed.job.undo(0).Begin(UndoKind::kUpdate, 2, kStep);
  killed.job.run_stamps()[2] = kStep;
  EXPECT_EQ(*killed.recovery->RollBack(kStep), 0u);
  EXPECT_EQ(killed.job.undo(0).kind.load(), 0u);
}

TEST(StepRecoveryTest, SlotsThatCannotBeAreDataLoss) {
  const auto roll_back = [](OptimizerKind optimizer, UndoKind kind,
                            uint64_t run, uint64_t stamp) {
    Recovered killed({.optimizer = optimizer});
    killed.job.undo(1).Begin(kind, run, stamp);
    return killed.recovery->RollBack(kStep).status();
  };
  const auto adamw = OptimizerKind::kAdamW;
  const auto lamb = OptimizerKind::kLamb;
  for (const absl::Status& status :
       {roll_back(adamw, UndoKind::kUpdate, 1000, kStep),
        roll_back(adamw, static_cast<UndoKind>(9), 0, kStep),
        roll_back(adamw, UndoKind::kUpdate, 0, kStep - 1),
        roll_back(adamw, UndoKind::kReplace, 0, kStep),
        roll_back(lamb, UndoKind::kUpdate, 0, kStep),
        roll_back(lamb, UndoKind::kReplace, 1, kStep),
        roll_back(lamb, UndoKind::kReplace, 0, kStep - 1)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  }
}

TEST(StepRecoveryTest, ACompleteReplacementIsInstalled) {
  Recovered killed({.optimizer = OptimizerKind::kLamb});
  Recovered plain({.optimizer = OptimizerKind::kLamb});
  ASSERT_TRUE(plain.Finish().ok());
  // Does the step, then leaves the new values of the last parameter beside
  // values that are half old.
  SchedulerTestJob& job = killed.job;
  job.SetUpdated({0, 0, 0, 0, 0, 1, 0});
  ASSERT_TRUE(killed.Finish().ok());
  const uint64_t first = job.layout().first_run(5);
  const size_t worker = job.undo(0).stamp == kStep ? 0 : 1;
  for (uint64_t run = first; run < job.layout().run_count(); ++run) {
    job.run_stamps()[run] = kStep - 1;
  }
  job.RecordOf(5, 0).parameter(5, 17)[0] ^= std::byte{1};
  job.undo(worker).Begin(UndoKind::kReplace, first, kStep);
  EXPECT_EQ(*killed.recovery->RollBack(kStep), 1u);
  job.SetUpdated({1, 1, 1, 1, 1, 1, 1});
  ASSERT_TRUE(killed.Finish().ok());
  EXPECT_EQ(job.State(), plain.job.State());
}

TEST(StepRecoveryTest, AStampFromTheFutureIsDataLoss) {
  Recovered recovered({});
  recovered.job.run_stamps()[3] = kStep;
  EXPECT_TRUE(recovered.recovery->CheckStamps(kStep).ok());
  const absl::Status status = recovered.recovery->CheckStamps(kStep - 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("run 3 "), std::string::npos) << status;
  recovered.recovery->ForgetStep();
  EXPECT_TRUE(recovered.recovery->CheckStamps(0).ok());
}

TEST(StepRecoveryTest, SumsAreRestoredOfTheirEpochAlone) {
  Recovered recovered({.accumulation = AccumulateDType::kFloat32});
  SchedulerTestJob& job = recovered.job;
  const Piece& piece = job.partitions()[0].pieces[0];
  const uint64_t runs = job.layout().first_run(1);
  for (uint64_t run = 0; run < runs; ++run) {
    job.staged_marks()[run] = storage::StagedMark(run == 1 ? 3 : 4, 2);
  }
  auto* const sums = reinterpret_cast<float*>(job.store().sums(0, 0));
  for (uint64_t i = 0; i < piece.numel; ++i) sums[i] = static_cast<float>(i);
  recovered.recovery->RestoreSums({4});
  job.plan().ForEachRunOf(0, [&](uint64_t run, uint64_t begin, uint64_t numel) {
    EXPECT_EQ(
        recovered.sums_of_squares[run],
        run == 1 ? -1
                 : kernels::SumOfSquares(DType::kFloat32, sums + begin, numel));
  });
  // The least of the runs counts.
  EXPECT_EQ(recovered.recovery->StagedMicroStep(piece, 4), -1);
  job.staged_marks()[1] = storage::StagedMark(4, 1);
  EXPECT_EQ(recovered.recovery->StagedMicroStep(piece, 4), 1);
  recovered.recovery->ForgetStaged();
  EXPECT_EQ(recovered.recovery->StagedMicroStep(piece, 4), -1);
}

TEST(StepRecoveryTest, APushInFlightIsRolledBack) {
  Recovered killed({.accumulation = AccumulateDType::kFloat32});
  SchedulerTestJob& job = killed.job;
  auto* const sums = reinterpret_cast<float*>(job.store().sums(0, 0));
  WorkerUndo& undo = job.undo(0);
  undo.Begin(UndoKind::kAccumulate, 0, storage::StagedMark(4, 2));
  for (size_t i = 0; i < 10; ++i) {
    undo.slot.old_sum[i] = static_cast<float>(i) + 1;
    sums[i] = -1;
  }
  undo.slot.saved = 10;
  sums[10] = -2;
  EXPECT_EQ(*killed.recovery->RollBack(0), 1u);
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(sums[i], static_cast<float>(i) + 1);
  EXPECT_EQ(sums[10], -2);
  EXPECT_EQ(undo.kind.load(), 0u);
}

TEST(StepRecoveryTest, GradientsAreNeededOfRunsWithoutTheStamp) {
  Recovered recovered({.ranks = 2});
  SchedulerTestJob& job = recovered.job;
  const StepUpdate update = job.UpdateOf(kStep);
  EXPECT_TRUE(recovered.recovery->NeedsGradients(0, update));
  for (auto& stamp : job.run_stamps()) stamp = kStep;
  EXPECT_FALSE(recovered.recovery->NeedsGradients(0, update));
  job.run_stamps()[job.layout().run_count() - 1] = kStep - 1;
  EXPECT_FALSE(recovered.recovery->NeedsGradients(0, update));
  EXPECT_TRUE(recovered.recovery->NeedsGradients(1, update));
}

}  // namespace
}  // namespace optstate::scheduler
