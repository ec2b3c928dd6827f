// The engine dies at chosen instants, in a process of its own.

#include <signal.h>
#include <unistd.h>

#include <vector>

#include "gtest/gtest.h"
#include "server/session/testing/job_crash_fixture.h"

namespace optstate::session {
namespace {

JobHarness::Setup WholeInSmallFormats() {
  JobHarness::Setup setup = TwoRanks();
  setup.layout.optimizer = OptimizerKind::kLamb;
  setup.layout.state_format = StateFormat::kDynamic8;
  setup.layout.master_format = MasterFormat::kSplit;
  setup.layout.groups = {{}, {}};
  return setup;
}

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

// The gradients come again, as over a wire.
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
  // A first engine is opened only to know the sizes.
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

// The segment behind the gradients of the step may lack its pages still.
TEST_P(DiesInside, TheStepIsFinishedFromMemoryThatHasWhatWasPushed) {
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  std::vector<KeptGradients> kept;
  kept.push_back(harness_.KeepGradients(0, 4096));
  kept.push_back(harness_.KeepGradients(1, 4096, BytesOfB()));
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// Holes in the gradients of the step are not read, whichever rank brings them.
TEST_P(DiesInside, TheStepIsNotFinishedFromHoles) {
  if (GetParam() > Instant::kFirstRun) GTEST_SKIP() << "not all are needed";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  const uint64_t holed = BytesOfB() - BytesOfB() % 4096 - 4096;
  std::vector<KeptGradients> kept;
  kept.push_back(harness_.KeepGradients(0, 4096));
  kept.push_back(harness_.KeepGradients(1, 4096, holed));
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  ASSERT_TRUE(harness_.Register(1).ok());
  AttachSpec spec = harness_.AttachSpecOf(1);
  spec.gradient_bytes_present = BytesOfB() - 1;
  EXPECT_EQ(harness_.job().Attach(spec).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  spec.gradient_bytes_present = BytesOfB();
  const absl::Status attached = harness_.job().Attach(spec).status();
  ASSERT_TRUE(attached.ok()) << attached;
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
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

// Engines die at every instant of the recovery, repeatedly.
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

INSTANTIATE_TEST_SUITE_P(All, DiesInside,
                         ::testing::Values(Instant::kMarked, Instant::kFirstRun,
                                           Instant::kLaterRun,
                                           Instant::kRunsDone));

// With non-separable updates, some parameters are installed, some are complete
// and not installed, some are not begun.
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

// The step that is open when a drain begins is finished after any crash.
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

class AccumulatingJobCrashTest : public JobCrashTest {
 protected:
  AccumulatingJobCrashTest() : JobCrashTest(TwoRanks(Case::kAccumulate)) {}
};

// The sums are in the state files: no rank is needed.
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
  // All gradients are pushed again: existing ones are not added twice.
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
}  // namespace optstate::session
