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
using ::testing::ElementsAre;
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

constexpr uint64_t kInstance = 70;

enum class Case { kPlain, kAccumulate, kRanksLackGradients };

JobHarness::Setup TwoRanks(Case of = Case::kPlain) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}, {.options = adam::kAmsgrad}};
  setup.layout.parameters = {
      MakeParameter("a", 20000),
      MakeParameter("b", 9000, 1, DType::kBFloat16, DType::kBFloat16),
      MakeParameter("idle", 5000, 1)};
  setup.world_size = 2;
  setup.accumulate = of == Case::kAccumulate;
  if (of == Case::kRanksLackGradients) {
    setup.partition = PartitionMode::kReplicated;
  }
  setup.client_instance = kInstance;
  return setup;
}

JobHarness::Setup WholeInSmallFormats() {
  JobHarness::Setup setup = TwoRanks();
  setup.layout.optimizer = OptimizerKind::kLamb;
  setup.layout.state_format = StateFormat::kDynamic8;
  setup.layout.master_format = MasterFormat::kSplit;
  setup.layout.groups = {{}, {}};
  return setup;
}

// Takes steps 1 and 2; then an engine dies in step 3, which clips and leaves a
// parameter out.
class JobCrashTest : public ::testing::Test {
 protected:
  explicit JobCrashTest(const JobHarness::Setup& setup = TwoRanks())
      : harness_(setup) {
    StartAt2(&harness_);
    committed_ = harness_.StateBytes();
    JobHarness undisturbed(setup);
    StartAt2(&undisturbed);
    TakeStep3(&undisturbed);
    expected_ = undisturbed.StateBytes();
  }

  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    if (step == 3) spec.max_norm = 1;
    return spec;
  }
  void StartAt2(JobHarness* harness) {
    harness->Start(harness->RandomTensors(1));
    for (uint64_t step = 1; step <= 2; ++step) {
      harness->Step(step, harness->RandomTensors(step), CommitOf(step));
    }
  }
  void PushStep3(JobHarness* harness) {
    if (harness->setup().partition == PartitionMode::kReplicated) {
      SetGradientsOfRanks(harness);
      for (uint32_t rank = 0; rank < 2; ++rank) {
        EXPECT_TRUE(harness->Push(rank, 3, rank, 1).ok());
      }
      return;
    }
    harness->SetGradients(harness->RandomTensors(3));
    harness->PushAll(3, 0, {2});
    if (!harness->setup().accumulate) return;
    harness->SetGradients(harness->RandomTensors(4));
    harness->PushAll(3, 1, {2});
  }
  void TakeStep3(JobHarness* harness) {
    PushStep3(harness);
    harness->CommitAll(CommitOf(3));
  }

  static void SetGradientsOfRanks(JobHarness* harness) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      harness->SetGradientsOf(rank, harness->RandomTensors(3 + rank));
    }
  }

  // A process opens the job, does `what` and is killed by it. Of one worker:
  // another one would go on while this one dies, and perhaps end the step.
  template <typename What>
  void DieIn(const What& what) {
    harness_.Close();  // no threads in this process when it forks
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      harness_.setup().workers = 1;
      what();
      ::_exit(2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
  }
  void DieInStep3(Instant instant) {
    DieIn([&] {
      Killer killer(instant);
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      TakeStep3(&harness_);
    });
  }
  // Whose memory the ranks' gradients of step 3 are still in.
  void RememberGradients() { harness_.SetGradients(harness_.RandomTensors(3)); }
  // The gradients of rank 0, which is back, were kept; rank 1 is away.
  void ReopenWithRank0() {
    ASSERT_TRUE(harness_.Open().ok());  // only to know the sizes
    RememberGradients();
    std::vector<KeptGradients> kept;
    kept.push_back(harness_.KeepGradients(0, 4096));
    harness_.Close();
    ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
    ASSERT_TRUE(harness_.Register(0).ok());
    ASSERT_TRUE(harness_.Attach(0).ok());
  }
  // The same, and it fails.
  void FailWithRank0() {
    ASSERT_NO_FATAL_FAILURE(ReopenWithRank0());
    harness_.job().GiveUp({.rank = 1, .client_instance = kInstance + 1});
    ASSERT_EQ(phase(), v1::JOB_PHASE_FAILED);
  }
  uint64_t committed_step() {
    return harness_.job().Describe().committed_step();
  }
  v1::JobPhase phase() { return harness_.job().Describe().phase(); }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(2, AdamHyperparams());
  JobHarness harness_;
  std::string committed_;
  std::string expected_;
};

class DiesInside : public JobCrashTest,
                   public ::testing::WithParamInterface<Instant> {};

TEST_P(DiesInside, TheStepIsFinishedWhenTheRanksAreBack) {
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  if (GetParam() == Instant::kRunsDone) {
    EXPECT_EQ(phase(), v1::JOB_PHASE_READY);  // no gradient is missing
  } else {
    EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
    EXPECT_EQ(committed_step(), 2);
  }
  RememberGradients();
  harness_.AttachAll();
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
  const auto answer = harness_.CommitAll(CommitOf(3));
  EXPECT_TRUE(answer.status.ok());
  EXPECT_TRUE(answer.outcome.applied);
  EXPECT_LT(answer.outcome.clip_coefficient, 1);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// As over a wire that brings the gradients again.
TEST_P(DiesInside, TheStepIsFinishedWhenTheGradientsHaveComeAgain) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are missing";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.Register(rank).ok());
    AttachSpec spec = harness_.AttachSpecOf(rank);
    spec.gradients_present = false;
    const auto attached = harness_.job().Attach(spec);
    ASSERT_TRUE(attached.ok()) << attached.status();
    EXPECT_EQ(attached->committed_step, 2);
    EXPECT_EQ(attached->phase, v1::JOB_PHASE_RECOVERING);
  }
  RememberGradients();
  harness_.PushAll(3, 0, {2});
  EXPECT_EQ(harness_.job().Abort(0, 3).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(harness_.job().BeginLoad(0).code(), absl::StatusCode::kUnavailable);
  CommitSpec other = CommitOf(3);
  other.max_norm = 2;
  const auto* refused = harness_.AnswerTo(0, harness_.Commit(0, other));
  ASSERT_NE(refused, nullptr);
  EXPECT_FALSE(refused->status.ok());
  const auto answer = harness_.CommitAll(CommitOf(3));
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// Rank 0 pushes again what the engine did not have when it attached, and learns
// afterwards that rank 1's gradients were all that was missing.
TEST_P(DiesInside, APushThatComesAfterTheStepWasFinishedIsARepeat) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are missing";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(committed_step(), 2);
    ASSERT_TRUE(harness_.Register(rank).ok());
    ASSERT_TRUE(harness_.Attach(rank).ok());
  }
  ASSERT_EQ(committed_step(), 3);
  const absl::Status pushed = harness_.Push(0, 3, 0, 2);
  EXPECT_TRUE(pushed.ok()) << pushed;
  const auto answer = harness_.CommitAll(CommitOf(3));
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_TRUE(harness_.StateBytes() == expected_);
  EXPECT_FALSE(harness_.Push(0, 2, 0, 2).ok());
}

TEST_P(DiesInside, TheStepIsFinishedAtOnceFromKeptGradients) {
  DieInStep3(GetParam());
  // A first engine only to know the sizes.
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  std::vector<KeptGradients> kept;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    kept.push_back(harness_.KeepGradients(rank, 4096));
  }
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// A rank comes and goes while the other one is away.
TEST_P(DiesInside, ARankMayLeaveWhoseGradientsAreKept) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(ReopenWithRank0());
  harness_.Commit(0, CommitOf(3));
  harness_.job().Leave(0);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(DiesInside, ARankThatLeavesTakesItsGradientsAlong) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  // Rank 1 has those of the part that is not updated yet.
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.Detach(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING) << "it may come back";
  EXPECT_EQ(harness_.job().Awaited().size(), 2u);
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.job().Leave(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
}

// It speaks over another connection, before its own is seen to have ended.
TEST_P(DiesInside, ARankThatSaidFarewellIsNotAwaited) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.job().TakeFarewell(1, kInstance + 2);  // somebody else's
  harness_.Detach(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.job().TakeFarewell(1, kInstance + 1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  harness_.Detach(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
}

TEST_P(DiesInside, ARankThatAttachedAndIsAwaitedAgainMayBeGivenUp) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.Detach(1);
  harness_.job().GiveUp({.rank = 1, .client_instance = kInstance + 1});
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
}

// An engine may fail to map them, and the next one not.
TEST_P(DiesInside, WhatWasKeptOfALostRankMayComeWithTheNextEngine) {
  if (GetParam() > Instant::kFirstRun) GTEST_SKIP() << "not all are needed";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());  // only to know the sizes
  RememberGradients();
  const auto reopen_with_those_of_rank_1 = [&] {
    std::vector<KeptGradients> kept;
    kept.push_back(harness_.KeepGradients(1, 4096));
    harness_.Close();
    ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
    EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  };
  reopen_with_those_of_rank_1();
  harness_.job().GiveUp({.rank = 1, .client_instance = kInstance + 1});
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
  reopen_with_those_of_rank_1();
  ASSERT_TRUE(harness_.Register(0).ok());
  ASSERT_TRUE(harness_.Attach(0).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// Nobody could watch it, and the step is finished without it.
TEST_P(DiesInside, ARankWhoseGradientsAreKeptAndThatIsLostIsNotAwaited) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(ReopenWithRank0());
  harness_.Detach(0);
  ASSERT_EQ(harness_.job().Awaited().size(), 1u);
  EXPECT_EQ(harness_.job().Awaited()[0].rank, 1u);
}

// Its process has ended, so that nobody comes to say so.
TEST_P(DiesInside, ARankThatAttachedAndDiedTakesItsGradientsAlong) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  harness_.setup().processes = {{}, {.pid = ::getpid(), .start_ticks = 1}};
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.Detach(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
}

// What the failed step's gradients were found in is not mapped any more.
TEST_P(DiesInside, WhoIsThereGoesOnAfterAFailure) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(FailWithRank0());
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.LoadMasters(harness_.RandomTensors(50));
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  const uint64_t next = committed_step() + 1;
  harness_.Step(next, harness_.RandomTensors(4), CommitOf(next));
  EXPECT_EQ(committed_step(), next);
}

TEST_P(DiesInside, WhoIsThereMayStartItOverFromACheckpoint) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(FailWithRank0());
  EXPECT_EQ(harness_.Push(0, 3, 0, 2).code(), absl::StatusCode::kDataLoss);
  const Tensors checkpoint = harness_.RandomTensors(50);
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.LoadMasters({checkpoint[0]});
  EXPECT_FALSE(harness_.FinishAll().status.ok());  // all of it, or nothing
  // A restart in between: still to be loaded, no longer failed.
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_LOADING);
  harness_.AttachAll();
  harness_.LoadMasters(checkpoint);
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_MASTER, 1), checkpoint[1]);
  EXPECT_THAT(harness_.Fetch(v1::STATE_ARRAY_STATE_0, 0), Each(0.0f));
  EXPECT_THAT(harness_.StepCounts(), Each(0));
  // Step 3 is taken anew, also by runs that the dead engine had stamped, and
  // finished by another engine.
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  harness_.AttachAll();
  EXPECT_EQ(committed_step(), 3);
  EXPECT_THAT(harness_.StepCounts(), ElementsAre(1, 1, 0));
  EXPECT_NE(harness_.Fetch(v1::STATE_ARRAY_MASTER, 0), checkpoint[0]);
}

// Also of the session that had them, which may not have them as they were.
TEST_P(DiesInside, AFailureStays) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(FailWithRank0());
  const absl::Status failure = harness_.Push(0, 3, 0, 2);
  for (int restart = 0; restart < 2; ++restart) {
    harness_.Close();
    ASSERT_TRUE(harness_.Open().ok());
    EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
    EXPECT_EQ(committed_step(), 2);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(harness_.Register(rank).ok());
      EXPECT_EQ(harness_.Attach(rank).status(), failure);
    }
  }
}

TEST_P(DiesInside, KeptGradientsOfAnotherInstanceAreNotUsed) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are missing";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  harness_.SetGradients(harness_.RandomTensors(9));
  std::vector<KeptGradients> kept;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    kept.push_back(harness_.KeepGradients(rank, 0));
    kept.back().client_instance += 100;
  }
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
}

// Each rank has a gradient that the other lacks.
class LacksGradients : public JobCrashTest,
                       public ::testing::WithParamInterface<Instant> {
 protected:
  LacksGradients() : JobCrashTest(TwoRanks(Case::kRanksLackGradients)) {}
};

TEST_P(LacksGradients, TheStepIsFinishedWithThoseThereWere) {
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  if (GetParam() != Instant::kRunsDone) {
    EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  }
  SetGradientsOfRanks(&harness_);
  harness_.AttachAll();
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

INSTANTIATE_TEST_SUITE_P(Instants, LacksGradients,
                         ::testing::Values(Instant::kMarked, Instant::kFirstRun,
                                           Instant::kLaterRun,
                                           Instant::kRunsDone));

// At every instant of the recovery, again and again.
TEST_P(DiesInside, DeathsWhileItIsFinished) {
  DieInStep3(GetParam());
  for (const Instant again :
       {Instant::kFirstRun, Instant::kLaterRun, Instant::kRunsDone}) {
    if (again < GetParam()) continue;
    DieIn([&] {
      Killer killer(again);
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      RememberGradients();
      harness_.AttachAll();
    });
  }
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  harness_.AttachAll();
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(DiesInside, AnotherProcessInTheRanksPlaceHasLostTheGradients) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  harness_.setup().client_instance = 0;
  const auto expect_loss = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(status.message(), HasSubstr("died inside step 3"));
    EXPECT_THAT(status.message(), HasSubstr("Last good step: 2"));
    EXPECT_THAT(status.message(), HasSubstr("optctl delete job test"));
  };
  ASSERT_TRUE(harness_.Register(0).ok());
  expect_loss(harness_.Attach(0).status());
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
  EXPECT_EQ(committed_step(), 2);
  std::vector<std::byte> out(4);
  expect_loss(harness_.job()
                  .Fetch(v1::STATE_ARRAY_MASTER, 0, 0, 1, absl::MakeSpan(out))
                  .status());
  expect_loss(harness_.job().ReadParameters(0, absl::MakeSpan(out)));
}

INSTANTIATE_TEST_SUITE_P(All, DiesInside,
                         ::testing::Values(Instant::kMarked, Instant::kFirstRun,
                                           Instant::kLaterRun,
                                           Instant::kRunsDone));

// Of parameters that are updated as a whole: some are in place, some are
// complete and not in place, some are not begun.
class WholeDiesInside : public JobCrashTest,
                        public ::testing::WithParamInterface<Instant> {
 protected:
  WholeDiesInside() : JobCrashTest(WholeInSmallFormats()) {}
};

TEST_P(WholeDiesInside, TheStepIsFinishedWhenTheRanksAreBack) {
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  harness_.AttachAll();
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

INSTANTIATE_TEST_SUITE_P(All, WholeDiesInside,
                         ::testing::Values(Instant::kMarked, Instant::kFirstRun,
                                           Instant::kLaterRun,
                                           Instant::kRunsDone));

TEST_F(JobCrashTest, DeathAfterTheRecordIsACommittedStep) {
  DieInStep3(Instant::kRecorded);
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
  // The ranks, which were not answered, ask again.
  harness_.AttachAll();
  const auto answer = harness_.CommitAll(CommitOf(3));
  EXPECT_TRUE(answer.status.ok());
  EXPECT_TRUE(answer.outcome.applied);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_F(JobCrashTest, DeathBetweenStepsLosesNothing) {
  DieIn([&] {
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    PushStep3(&harness_);
    ::kill(::getpid(), SIGKILL);
  });
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_TRUE(harness_.StateBytes() == committed_);
}

// The step that is open when a drain begins is finished, whoever dies.
TEST_F(JobCrashTest, ADrainingJobTakesBackTheRanksOfItsOpenStep) {
  harness_.SetGradients(harness_.RandomTensors(3));
  ASSERT_TRUE(harness_.Push(0, 3, 0, 1).ok());
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  harness_.job().BeginDrain();
  harness_.setup().client_instance = kInstance + 10;
  ASSERT_TRUE(harness_.Register(0).ok());
  const absl::Status stranger = harness_.Attach(0).status();
  EXPECT_EQ(stranger.code(), absl::StatusCode::kUnavailable) << stranger;
  harness_.setup().client_instance = kInstance;
  harness_.AttachAll();
  TakeStep3(&harness_);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
  const absl::Status next = harness_.Push(0, 4, 0, 1);
  EXPECT_EQ(next.code(), absl::StatusCode::kUnavailable) << next;
}

TEST_F(JobCrashTest, AMissingUndoFileIsNoticed) {
  DieInStep3(Instant::kFirstRun);
  ASSERT_EQ(::unlink((harness_.directory() + "/state/undo").c_str()), 0);
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(harness_.job().Describe().reason(), HasSubstr("undo is missing"));
}

class AccumulatingJobCrashTest : public JobCrashTest {
 protected:
  AccumulatingJobCrashTest() : JobCrashTest(TwoRanks(Case::kAccumulate)) {}
};

// The sums are in the state files: nobody is needed.
TEST_F(AccumulatingJobCrashTest, TheStepIsFinishedAtOnce) {
  DieInStep3(Instant::kLaterRun);
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_F(AccumulatingJobCrashTest, WhatWasStagedIsThereForWhoStagedIt) {
  DieIn([&] {
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    harness_.SetGradients(harness_.RandomTensors(3));
    harness_.PushAll(3, 0, {2});
    // The second micro-step got as far as the first parameter.
    harness_.SetGradients(harness_.RandomTensors(4));
    for (uint32_t rank = 0; rank < 2; ++rank) {
      if (!harness_.Push(rank, 3, 0, 1, 1).ok()) ::_exit(1);
    }
    ::kill(::getpid(), SIGKILL);
  });
  ASSERT_TRUE(harness_.Open().ok());
  std::vector<int> staged(3, -1);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.Register(rank).ok());
    const auto attached = harness_.Attach(rank);
    ASSERT_TRUE(attached.ok());
    const auto& pieces = (*harness_.job().partition(rank))->pieces;
    for (const StagedRange& range : attached->staged) {
      for (uint32_t i = 0; i < range.piece_count; ++i) {
        staged[pieces[range.first_piece + i].parameter] =
            static_cast<int>(range.micro_step);
      }
    }
  }
  EXPECT_EQ(staged, std::vector<int>({1, 0, -1}));
  // All of it again: what is there is not added twice.
  harness_.SetGradients(harness_.RandomTensors(4));
  harness_.PushAll(3, 1, {2});
  harness_.CommitAll(CommitOf(3));
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_F(AccumulatingJobCrashTest, WhatWasStagedIsNotThereForAnother) {
  DieIn([&] {
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    harness_.SetGradients(harness_.RandomTensors(7));
    harness_.PushAll(3, 0);
    ::kill(::getpid(), SIGKILL);
  });
  harness_.setup().client_instance = kInstance + 10;
  ASSERT_TRUE(harness_.Open().ok());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.Register(rank).ok());
    const auto attached = harness_.Attach(rank);
    ASSERT_TRUE(attached.ok());
    EXPECT_TRUE(attached->staged.empty());
  }
  TakeStep3(&harness_);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

}  // namespace
}  // namespace optstate
