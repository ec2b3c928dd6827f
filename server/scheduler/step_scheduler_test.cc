// Runs whole steps on each executor: the bits are those of one worker of the
// CPU, whatever the order in which tasks are done.

#include "server/scheduler/step_scheduler.h"

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/executors/fake_update_executor.h"
#include "server/scheduler/scheduler_test_job.h"

namespace optstate::scheduler {
namespace {

using JobSetup = SchedulerTestJob::Setup;

// A job and its scheduler.
class Runner {
 public:
  // Makes a job on the fake executor with this seed; 0: on the CPU.
  Runner(JobSetup setup, int workers, uint64_t fake_seed) {
    setup.workers = workers;
    job_ = std::make_unique<SchedulerTestJob>(setup);
    StepScheduler::Options options;
    options.store = &job_->store();
    options.grain_elements = kTileElements;
    options.recovery = job_->memory().recovery;
    options.control = &job_->control();
    options.undo = {reinterpret_cast<std::byte*>(job_->memory().undo.data()),
                    StepScheduler::WorkerUndoBytes(workers)};
    options.redo = job_->memory().redo;
    options.speculation = job_->memory().speculation;
    options.pool = &job_->pool();
    if (fake_seed != 0) {
      fake_ = std::make_unique<FakeUpdateExecutor>(&job_->undo(0), fake_seed);
      options.executor = fake_.get();
    }
    scheduler_ = *StepScheduler::Create(options);
    scheduler_->SetPartitions(job_->partitions(), setup.replicated);
    is_replicated_ = setup.replicated;
    accumulates_ = setup.accumulation.has_value();
  }

  SchedulerTestJob& job() { return *job_; }
  StepScheduler& scheduler() { return *scheduler_; }
  FakeUpdateExecutor& fake() { return *fake_; }

  // Stages new gradients of all ranks; with accumulation two micro-steps.
  void Stage(uint64_t step) {
    for (uint64_t micro = 0; micro < (accumulates_ ? 2u : 1u); ++micro) {
      job_->FillGradients(10 * step + micro);
      const uint32_t ranks =
          is_replicated_ ? 1 : static_cast<uint32_t>(job_->partitions().size());
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        scheduler_->Stage(job_->StagingOf(
            rank, storage::StagedMark(static_cast<uint32_t>(step),
                                      static_cast<uint32_t>(micro))));
      }
    }
  }
  void Begin() { job_->control().counts_begun = 0; }

  // Returns the norms of what is staged, of all kinds.
  std::vector<double> Norms(uint64_t step) {
    const StepUpdate update = job_->UpdateOf(step);
    std::vector<double> norms(2 + update.updated.size());
    norms.push_back(scheduler_->SumOfSquares(update.updated,
                                             absl::MakeSpan(norms).first(2)));
    scheduler_->NormsByParameter(update.updated, absl::MakeSpan(norms).subspan(
                                                     2, update.updated.size()));
    norms.push_back(scheduler_->Norm(1, update));
    norms.push_back(
        scheduler_->Norm(std::numeric_limits<double>::infinity(), update));
    return norms;
  }

 private:
  std::unique_ptr<SchedulerTestJob> job_;
  std::unique_ptr<FakeUpdateExecutor> fake_;
  std::unique_ptr<StepScheduler> scheduler_;
  bool is_replicated_ = false;
  bool accumulates_ = false;
};

struct ExecutorParam {
  std::string name;
  int workers = 1;
  uint64_t fake_seed = 0;
};

class StepSchedulerTest : public testing::TestWithParam<ExecutorParam> {
 protected:
  static Runner Make(const JobSetup& setup) {
    return Runner(setup, GetParam().workers, GetParam().fake_seed);
  }
  static Runner MakeBaseline(const JobSetup& setup) {
    return Runner(setup, 1, 0);
  }

  static void ExpectSameSteps(const JobSetup& setup) {
    Runner runner = Make(setup);
    Runner baseline = MakeBaseline(setup);
    for (uint64_t step = 1; step <= 3; ++step) {
      for (Runner* each : {&runner, &baseline}) {
        each->Stage(step);
        each->Begin();
      }
      EXPECT_EQ(runner.Norms(step), baseline.Norms(step));
      const std::vector<std::byte> before = runner.job().State();
      for (Runner* each : {&runner, &baseline}) {
        ASSERT_TRUE(each->scheduler().Apply(each->job().UpdateOf(step)).ok());
      }
      EXPECT_NE(runner.job().State(), before);
      EXPECT_EQ(runner.job().State(), baseline.job().State());
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Executors, StepSchedulerTest,
                         testing::Values(ExecutorParam{"Cpu1", 1, 0},
                                         ExecutorParam{"Cpu3", 3, 0},
                                         ExecutorParam{"Fake1", 1, 1},
                                         ExecutorParam{"Fake2", 3, 2}),
                         [](const auto& tested) { return tested.param.name; });

TEST_P(StepSchedulerTest, StepsHaveTheSameBits) {
  ExpectSameSteps({});
  ExpectSameSteps(
      {.state = StateFormat::kBFloat16, .master = MasterFormat::kSplit});
  ExpectSameSteps({.state = StateFormat::kDynamic8, .ranks = 3});
}

TEST_P(StepSchedulerTest, NumbersByParameterMoveOn) {
  ExpectSameSteps({.optimizer = OptimizerKind::kNadam});
}

TEST_P(StepSchedulerTest, SumsOfMicroStepsHaveTheSameBits) {
  ExpectSameSteps({.accumulation = AccumulateDType::kFloat32, .ranks = 2});
  ExpectSameSteps({.accumulation = AccumulateDType::kGradient, .ranks = 2});
}

TEST_P(StepSchedulerTest, ReplicatedGradientsAreSummedInOrder) {
  ExpectSameSteps({.ranks = 3, .replicated = true});
  ExpectSameSteps({.accumulation = AccumulateDType::kFloat32,
                   .ranks = 3,
                   .replicated = true});
}

TEST_P(StepSchedulerTest, NonSeparableUpdatesHaveTheSameBits) {
  ExpectSameSteps({.optimizer = OptimizerKind::kLamb});
  ExpectSameSteps({.optimizer = OptimizerKind::kAdafactor,
                   .state = StateFormat::kBFloat16,
                   .master = MasterFormat::kSplit});
}

TEST_P(StepSchedulerTest, ParametersWithoutGradientStay) {
  Runner runner = Make({});
  const size_t count = runner.job().layout().parameters().size();
  runner.Stage(1);
  runner.job().SetUpdated(std::vector<uint8_t>(count, 0));
  const std::vector<std::byte> before = runner.job().State();
  ASSERT_TRUE(runner.scheduler().Apply(runner.job().UpdateOf(1)).ok());
  EXPECT_EQ(runner.job().State(), before);
}

TEST_P(StepSchedulerTest, ASpeculationIsRolledBackToTheBit) {
  Runner runner = Make({.master = MasterFormat::kSplit});
  Runner baseline = MakeBaseline({.master = MasterFormat::kSplit});
  for (uint64_t step = 1; step <= 2; ++step) {
    const std::vector<std::byte> before = runner.job().State();
    runner.Stage(step);
    baseline.Stage(step);
    runner.Begin();
    baseline.Begin();
    const StepUpdate update = runner.job().UpdateOf(step);
    ASSERT_TRUE(runner.scheduler().Speculate(update).ok());
    EXPECT_NE(runner.job().State(), before);
    ASSERT_TRUE(runner.scheduler().RollBackSpeculation(step).ok());
    EXPECT_EQ(runner.job().State(), before);
    // The step that was begun early once more is finished by Apply().
    ASSERT_TRUE(runner.scheduler().Speculate(update).ok());
    ASSERT_TRUE(runner.scheduler().Apply(update).ok());
    ASSERT_TRUE(baseline.scheduler().Apply(baseline.job().UpdateOf(step)).ok());
    EXPECT_EQ(runner.job().State(), baseline.job().State());
  }
}

// The CPU has no errors of its own.
TEST(StepSchedulerOnFakeTest, AnErrorIsMadeGoodByTheSameCall) {
  Runner baseline({}, 1, 0);
  baseline.Stage(1);
  ASSERT_TRUE(baseline.scheduler().Apply(baseline.job().UpdateOf(1)).ok());
  const uint64_t runs = baseline.job().layout().run_count();
  for (uint64_t done = 0; done < runs; ++done) {
    Runner runner({}, 1, /*fake_seed=*/done + 1);
    runner.Stage(1);
    runner.fake().FailAfter(done, absl::UnavailableError("injected"));
    const StepUpdate update = runner.job().UpdateOf(1);
    EXPECT_EQ(runner.scheduler().Apply(update).message(), "injected");
    uint64_t stamped = 0;
    for (const auto& stamp : runner.job().run_stamps()) stamped += stamp.load();
    EXPECT_EQ(stamped, done);
    EXPECT_EQ(runner.job().step_counts()[0], 0);
    ASSERT_TRUE(runner.scheduler().Apply(update).ok());
    EXPECT_EQ(runner.job().State(), baseline.job().State());
  }
}

}  // namespace
}  // namespace optstate::scheduler
