// An engine dies inside a step, and ranks end before the step is finished.

#include <fcntl.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_crash_fixture.h"

namespace optstate::session {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

using LostGradients = DiesInside;

// A rank comes and goes while the other one is away.
TEST_P(LostGradients, ARankMayLeaveWhoseGradientsAreKept) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(ReopenWithRank0());
  harness_.Commit(0, CommitOf(3));
  harness_.job().Leave(0);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  EXPECT_THAT(harness_.kept(), ElementsAre(Pair(0, kInstance)));
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  EXPECT_EQ(committed_step(), 3);
  EXPECT_THAT(harness_.kept(), ElementsAre(Pair(1, kInstance + 1)));
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// The rank brought its gradients back, so that they are kept again.
TEST_P(LostGradients, ARankMayLeaveWhoseMemoryIsKnown) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_TRUE(harness_.Open().ok());
  RememberGradients();
  ASSERT_TRUE(harness_.Register(1).ok());
  {
    AttachSpec spec = harness_.AttachSpecOf(1);
    const KeptGradients memory = harness_.KeepGradients(1, 4096);
    spec.gradient_segment = memory.segment.get();
    spec.gradient_offset_bytes = memory.gradient_offset_bytes;
    ASSERT_TRUE(harness_.job().Attach(spec).ok());
  }
  harness_.job().Leave(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  ASSERT_TRUE(harness_.Register(0).ok());
  ASSERT_TRUE(harness_.Attach(0).ok());
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(LostGradients, ARankThatLeavesTakesItsGradientsAlong) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(ReopenWithRank1());
  harness_.Detach(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING) << "it may come back";
  EXPECT_EQ(harness_.job().Awaited().size(), 2u);
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.job().Leave(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
}

// The rank says farewell over another connection, before its own is seen to
// have ended.
TEST_P(LostGradients, ARankThatSaidFarewellIsNotAwaited) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(ReopenWithRank1());
  harness_.job().NoteFarewell(1, kInstance + 2);  // another instance
  harness_.Detach(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.job().NoteFarewell(1, kInstance + 1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_RECOVERING);
  harness_.Detach(1);
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
}

TEST_P(LostGradients, ARankThatAttachedAndIsAwaitedAgainMayBeGivenUp) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(ReopenWithRank1());
  harness_.Detach(1);
  harness_.job().GiveUp({.rank = 1, .client_instance = kInstance + 1});
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
}

// An engine may fail to map the gradients, and the next one may succeed.
TEST_P(LostGradients, WhatWasKeptOfALostRankMayComeWithTheNextEngine) {
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
  std::vector<KeptGradients> of_rank_0;
  of_rank_0.push_back(harness_.KeepGradients(0, 0));
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(of_rank_0)).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(harness_.kept(), ElementsAre(Pair(0, kInstance)));
  reopen_with_those_of_rank_1();
  ASSERT_TRUE(harness_.Register(0).ok());
  ASSERT_TRUE(harness_.Attach(0).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// The rank's process could not be watched, and the step is finished without the
// rank.
TEST_P(LostGradients, ARankWhoseGradientsAreKeptAndThatIsLostIsNotAwaited) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(ReopenWithRank0());
  harness_.Detach(0);
  ASSERT_EQ(harness_.job().Awaited().size(), 1u);
  EXPECT_EQ(harness_.job().Awaited()[0].rank, 1u);
}

// The rank's process has ended, so that no farewell can come.
TEST_P(LostGradients, ARankThatAttachedAndDiedTakesItsGradientsAlong) {
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

// The memory with the failed step's gradients is not mapped any more.
TEST_P(LostGradients, WhoIsThereGoesOnAfterAFailure) {
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

TEST_P(LostGradients, WhoIsThereMayStartItOverFromACheckpoint) {
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
  // After a restart in between, the job is still to be loaded, no longer
  // failed.
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

// No engine can finish the step any more.
TEST_P(LostGradients, AStepThatIsGivenUpLetsGoOfWhatWasKept) {
  if (GetParam() == Instant::kRunsDone) GTEST_SKIP() << "none are needed";
  DieInStep3(GetParam());
  ASSERT_NO_FATAL_FAILURE(ReopenWithRank0());
  std::vector<KeptGradients> kept;
  kept.push_back(harness_.KeepGradients(0, 0));
  harness_.Detach(0);
  EXPECT_THAT(harness_.kept(), ElementsAre(Pair(0, kInstance)));
  harness_.job().GiveUp({.rank = 1, .client_instance = kInstance + 1});
  ASSERT_EQ(phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(harness_.kept(), IsEmpty());
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  ASSERT_EQ(phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(harness_.kept(), IsEmpty());
}

// The engine also closes unneeded segments, once the job is open.
TEST_P(LostGradients, WhatNoStepNeedsIsClosed) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  std::vector<KeptGradients> kept(1);
  kept[0].client_instance = kInstance;
  kept[0].segment.reset(ends[1]);
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  ASSERT_EQ(phase(), v1::JOB_PHASE_READY);
  const UniqueFd reader(ends[0]);
  char byte;
  EXPECT_EQ(::read(reader.get(), &byte, 1), 0) << "somebody may still write";
}

// The failure stays also for the session that had the gradients, which may have
// changed them.
TEST_P(LostGradients, AFailureStays) {
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

TEST_P(LostGradients, KeptGradientsOfAnotherInstanceAreNotUsed) {
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

TEST_P(LostGradients, AnotherProcessInTheRanksPlaceHasLostTheGradients) {
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

INSTANTIATE_TEST_SUITE_P(All, LostGradients,
                         ::testing::Values(Instant::kMarked, Instant::kFirstRun,
                                           Instant::kLaterRun,
                                           Instant::kRunsDone));

}  // namespace
}  // namespace optstate::session
