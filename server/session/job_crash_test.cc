// The engine dies at chosen instants, in a process of its own.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/job_harness.h"

namespace optstate {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

enum class Instant { kMarked, kFirstRun, kLaterRun, kRunsDone, kRecorded };

// Kills the process when step 3 comes to an instant.
class Killer final : public StepObserver {
 public:
  explicit Killer(Instant instant) : instant_(instant) {}
  void OnStepMarked(uint64_t step) override { At(step, Instant::kMarked); }
  void OnRunUpdated(uint64_t step, uint64_t) override {
    if (step != 3) return;
    At(step, Instant::kFirstRun);
    if (++runs_ == 4) At(step, Instant::kLaterRun);
  }
  void OnRunsDone(uint64_t step) override { At(step, Instant::kRunsDone); }
  void OnStepRecorded(uint64_t step) override { At(step, Instant::kRecorded); }

 private:
  void At(uint64_t step, Instant instant) {
    if (step == 3 && instant == instant_) ::kill(::getpid(), SIGKILL);
  }

  const Instant instant_;
  std::atomic<int> runs_{0};
};

JobHarness::Setup TwoRanks() {
  JobHarness::Setup setup;
  setup.layout.groups = {{}, {true}};
  setup.layout.parameters = {
      MakeParameter("a", 20000),
      MakeParameter("b", 9000, 1, DType::kBFloat16, DType::kBFloat16)};
  setup.world_size = 2;
  return setup;
}

class JobCrashTest : public ::testing::Test {
 protected:
  // Steps 1 and 2 are taken; in step 3 the engine dies at the instant.
  explicit JobCrashTest(JobHarness::Setup setup = TwoRanks())
      : harness_(std::move(setup)) {
    harness_.Start(harness_.RandomTensors(1));
    for (uint64_t step = 1; step <= 2; ++step) TakeStep(&harness_, step);
    committed_ = harness_.StateBytes();
  }
  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    return spec;
  }
  void TakeStep(JobHarness* harness, uint64_t step) {
    harness->Step(step, harness->RandomTensors(step), CommitOf(step));
  }
  void DieInStep3(Instant instant) {
    harness_.Close();  // no threads in this process when it forks
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Killer killer(instant);
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      TakeStep(&harness_, 3);
      ::_exit(2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
    ASSERT_TRUE(harness_.Open().ok());
  }

  const std::vector<Hyperparams> groups_{2};
  JobHarness harness_;
  std::string committed_;
};

class DiesInside : public JobCrashTest,
                   public ::testing::WithParamInterface<Instant> {};

TEST_P(DiesInside, TheJobSaysSoAndNeverTrainsOn) {
  DieInStep3(GetParam());
  const auto expect_loss = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(status.message(), HasSubstr("died inside step 3"));
    EXPECT_THAT(status.message(), HasSubstr("Last good step: 2"));
    EXPECT_THAT(status.message(), HasSubstr("optctl delete job test"));
  };
  const v1::Job job = harness_.job().Describe();
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
  EXPECT_EQ(job.committed_step(), 2);
  expect_loss(absl::DataLossError(job.reason()));
  const auto registered = harness_.Register(0);
  ASSERT_TRUE(registered.ok());
  EXPECT_EQ(registered->phase, v1::JOB_PHASE_FAILED);
  expect_loss(harness_.Attach(0).status());
  std::vector<std::byte> out(4);
  expect_loss(harness_.job()
                  .Fetch(v1::STATE_ARRAY_MASTER, 0, 0, 1, absl::MakeSpan(out))
                  .status());
  expect_loss(harness_.job().ReadParameters(0, absl::MakeSpan(out)));
}

TEST_P(DiesInside, ACheckpointMayBeLoadedIntoIt) {
  DieInStep3(GetParam());
  harness_.setup().accept_failed = true;
  harness_.AttachAll();
  EXPECT_EQ(harness_.Push(0, 3, 0, 2).code(), absl::StatusCode::kDataLoss);
  const auto* refused = harness_.AnswerTo(0, harness_.Commit(0, CommitOf(3)));
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->status.code(), absl::StatusCode::kDataLoss);
  const Tensors checkpoint = harness_.RandomTensors(50);
  harness_.LoadMasters({checkpoint[0]});
  EXPECT_FALSE(harness_.FinishAll().status.ok());  // all of it, or nothing
  // A restart in between: still to be loaded, no longer failed.
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_LOADING);
  harness_.AttachAll();
  harness_.LoadMasters(checkpoint);
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_MASTER, 1), checkpoint[1]);
  EXPECT_THAT(harness_.Fetch(v1::STATE_ARRAY_EXP_AVG, 0), Each(0.0f));
  EXPECT_THAT(harness_.StepCounts(), Each(0));
  TakeStep(&harness_, 3);
}

INSTANTIATE_TEST_SUITE_P(All, DiesInside,
                         ::testing::Values(Instant::kMarked, Instant::kFirstRun,
                                           Instant::kLaterRun,
                                           Instant::kRunsDone));

TEST_F(JobCrashTest, DeathAfterTheRecordIsACommittedStep) {
  JobHarness undisturbed(TwoRanks());
  undisturbed.Start(undisturbed.RandomTensors(1));
  for (uint64_t step = 1; step <= 3; ++step) TakeStep(&undisturbed, step);
  const std::string expected = undisturbed.StateBytes();
  undisturbed.Close();
  DieInStep3(Instant::kRecorded);
  EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(harness_.job().Describe().committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected);
  // The ranks, which were not answered, ask again.
  harness_.AttachAll();
  const auto answer = harness_.CommitAll(CommitOf(3));
  EXPECT_TRUE(answer.status.ok());
  EXPECT_TRUE(answer.outcome.applied);
  EXPECT_TRUE(harness_.StateBytes() == expected);
}

TEST_F(JobCrashTest, DeathBetweenStepsLosesNothing) {
  harness_.Close();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    harness_.SetGradients(harness_.RandomTensors(3));
    harness_.PushAll(3);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_READY);
  EXPECT_TRUE(harness_.StateBytes() == committed_);
}

}  // namespace
}  // namespace optstate
