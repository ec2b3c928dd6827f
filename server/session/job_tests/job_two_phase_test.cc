// Steps that are prepared, and taken when all nodes have decided.

#include <unistd.h>

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/two_phase_fixture.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_P(TwoPhaseTest, IsTakenOnceAsItWasPrepared) {
  const StepOutcome prepared = Prepare();
  EXPECT_TRUE(prepared.applied);
  EXPECT_LT(prepared.clip_coefficient, 1);
  EXPECT_EQ(committed_step(), 2);
  ASSERT_TRUE(Prepared().has_value());
  EXPECT_EQ(Prepared()->digest, digest_);
  const auto first = Decide(0, VerdictOf(Verdict::kCommit));
  ASSERT_TRUE(first.status.ok()) << first.status;
  EXPECT_FALSE(first.outcome.prepared);
  EXPECT_EQ(first.outcome.gradient_norm, prepared.gradient_norm);
  const auto second = Decide(1, VerdictOf(Verdict::kCommit));
  EXPECT_EQ(second.outcome.step, 3u);
  EXPECT_EQ(second.outcome.digest, digest_);
  EXPECT_FALSE(Prepared().has_value());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(TwoPhaseTest, AnAbortedStepIsTakenAgain) {
  Prepare();
  EXPECT_TRUE(Decide(1, VerdictOf(Verdict::kAbort)).status.ok());
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kAbort)).status.ok());
  EXPECT_FALSE(Prepared().has_value());
  EXPECT_TRUE(harness_.StateBytes() == committed_);
  const uint64_t digest = digest_;
  Prepare();
  EXPECT_EQ(digest_, digest);
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kCommit)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(TwoPhaseTest, AnotherNodeMayHaveItSkipped) {
  Prepare();
  const auto answer = Decide(0, VerdictOf(Verdict::kSkip));
  EXPECT_EQ(answer.outcome.step, 3u);
  EXPECT_FALSE(answer.outcome.applied);
  EXPECT_TRUE(answer.outcome.found_inf);
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == committed_);
  EXPECT_TRUE(Decide(1, VerdictOf(Verdict::kCommit)).status.ok());
}

TEST_P(TwoPhaseTest, AVerdictThatDoesNotFitChangesNothing) {
  Prepare();
  StepVerdict other = VerdictOf(Verdict::kCommit);
  ++other.digest;
  const absl::Status refused = Decide(0, other).status;
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(refused.message(),
              HasSubstr(absl::StrCat(absl::Hex(digest_, absl::kZeroPad16))));
  EXPECT_THAT(
      refused.message(),
      HasSubstr(absl::StrCat(absl::Hex(other.digest, absl::kZeroPad16))));
  other = VerdictOf(Verdict::kCommit);
  other.step = 4;
  EXPECT_TRUE(absl::IsFailedPrecondition(Decide(0, other).status));
  EXPECT_TRUE(absl::IsInvalidArgument(
      Decide(0, VerdictOf(static_cast<Verdict>(9))).status));
  // Nor does anything else.
  EXPECT_TRUE(absl::IsFailedPrecondition(harness_.Push(0, 3, 0, 1)));
  EXPECT_TRUE(absl::IsFailedPrecondition(harness_.job().Abort(0, 3)));
  EXPECT_TRUE(absl::IsFailedPrecondition(harness_.job().BeginLoad(0)));
  ASSERT_TRUE(Prepared().has_value());
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kCommit)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
  // Another verdict comes too late.
  EXPECT_TRUE(
      absl::IsFailedPrecondition(Decide(0, VerdictOf(Verdict::kAbort)).status));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(Decide(0, VerdictOf(Verdict::kSkip)).status));
}

TEST_P(TwoPhaseTest, ItsGradientsOutliveItsRanks) {
  ASSERT_NO_FATAL_FAILURE(AttachWithSegments());
  Prepare();
  harness_.DetachAll();
  ASSERT_TRUE(Prepared().has_value());
  EXPECT_EQ(harness_.kept().size(), 2u);
  harness_.setup().client_instance += 100;  // other processes
  EXPECT_TRUE(absl::IsFailedPrecondition(harness_.Attach(0).status()));
  const auto outcome =
      harness_.job().DecideUnattached(VerdictOf(Verdict::kCommit));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->step, 3u);
  EXPECT_THAT(harness_.kept(), IsEmpty());
  EXPECT_TRUE(
      harness_.job().DecideUnattached(VerdictOf(Verdict::kCommit)).ok());
  harness_.AttachAll();
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// Another trainer of the same job must not part what its nodes decide together.
TEST_P(TwoPhaseTest, OnlyItsRanksDecideWhileTheyAreAttached) {
  Prepare();
  for (const Verdict verdict : {Verdict::kCommit, Verdict::kAbort}) {
    const auto outcome = harness_.job().DecideUnattached(VerdictOf(verdict));
    EXPECT_TRUE(absl::IsUnavailable(outcome.status())) << outcome.status();
  }
  ASSERT_TRUE(Prepared().has_value());
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kCommit)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(TwoPhaseTest, ItOutlivesItsEngine) {
  ASSERT_NO_FATAL_FAILURE(AttachWithSegments());
  Prepare();
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(segments_)).ok());
  ASSERT_TRUE(Prepared().has_value());
  EXPECT_EQ(Prepared()->digest, digest_);
  const auto outcome =
      harness_.job().DecideUnattached(VerdictOf(Verdict::kCommit));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  harness_.AttachAll();
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(TwoPhaseTest, ItMayBeAbortedByTheNextEngine) {
  ASSERT_NO_FATAL_FAILURE(AttachWithSegments());
  Prepare();
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(segments_)).ok());
  EXPECT_TRUE(harness_.job().DecideUnattached(VerdictOf(Verdict::kAbort)).ok());
  EXPECT_FALSE(Prepared().has_value());
  harness_.setup().client_instance += 100;
  harness_.AttachAll();
  EXPECT_TRUE(harness_.StateBytes() == committed_);
  Prepare();
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kCommit)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// The ranks' processes live, and bring their gradients back.
TEST_P(TwoPhaseTest, ItsRanksComeBackToTheNextEngine) {
  Prepare();
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  ASSERT_TRUE(Prepared().has_value());
  if (GetParam() == Case::kRanksLackGradients) {
    SetGradientsOfRanks(&harness_);
  } else {
    RememberGradients();
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.Register(rank).ok());
    ASSERT_TRUE(harness_.Attach(rank).ok());
  }
  // Calls that a rank repeats are answered as before.
  EXPECT_TRUE(harness_.Push(0, 3, 0, 1).ok());
  const uint64_t request = harness_.Commit(0, TwoPhaseCommit());
  ASSERT_NE(harness_.AnswerTo(0, request), nullptr);
  EXPECT_EQ(harness_.AnswerTo(0, request)->outcome.digest, digest_);
  EXPECT_TRUE(Decide(1, VerdictOf(Verdict::kCommit)).status.ok());
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kCommit)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// No tile is touched, so that nothing is lost but the preparation.
TEST_P(TwoPhaseTest, WithoutItsGradientsItWasNeverPrepared) {
  if (GetParam() == Case::kAccumulate) GTEST_SKIP() << "the sums stay";
  Prepare();
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  harness_.job().GiveUp({.rank = 0, .client_instance = kInstance});
  EXPECT_FALSE(Prepared().has_value());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      harness_.job().DecideUnattached(VerdictOf(Verdict::kCommit)).status()));
  harness_.setup().client_instance += 100;
  harness_.AttachAll();
  EXPECT_TRUE(harness_.StateBytes() == committed_);
  TakeStep3(&harness_);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(TwoPhaseTest, AnEngineThatDiesInItFinishesIt) {
  DieIn([&] {
    Killer killer(Instant::kFirstRun);
    harness_.setup().observer = &killer;
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    Prepare();
    Decide(0, VerdictOf(Verdict::kCommit));
  });
  ASSERT_NO_FATAL_FAILURE(FinishWithTheNextEngine());
}

TEST_P(TwoPhaseTest, RanksThatDisagreeAboutThePhasesAreRefused) {
  PushStep3(&harness_);
  const uint64_t first = harness_.Commit(0, CommitOf(3));
  harness_.Commit(1, TwoPhaseCommit());
  ASSERT_NE(harness_.AnswerTo(0, first), nullptr);
  EXPECT_THAT(harness_.AnswerTo(0, first)->status.message(),
              HasSubstr("two_phase"));
}

INSTANTIATE_TEST_SUITE_P(Cases, TwoPhaseTest,
                         ::testing::Values(Case::kPlain, Case::kAccumulate,
                                           Case::kRanksLackGradients));

}  // namespace
}  // namespace optstate::session
