// Prepared steps that are clipped by the norm of all nodes.

#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/two_phase_fixture.h"
#include "storage/persist_in_order.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

using ClippedStepTest = TwoPhaseTest;

TEST_P(ClippedStepTest, IsClippedByTheNormOfAllNodes) {
  EXPECT_TRUE(absl::IsFailedPrecondition(PreparedSums().status()));
  const StepOutcome prepared = PrepareUnclipped();
  EXPECT_EQ(prepared.clip_coefficient, 1);
  auto sums = PreparedSums();
  ASSERT_TRUE(sums.ok()) << sums.status();
  EXPECT_EQ(sums->back(), -1) << "it has no gradient";
  sums->pop_back();
  double sum = 0;
  for (const double each : *sums) sum += each;
  EXPECT_EQ(std::sqrt(sum), prepared.gradient_norm);
  const StepVerdict clipping = ClippedAsOnOneNode(prepared);
  EXPECT_LT(clipping.clip_coefficient, 1);
  StepVerdict other = clipping;
  other.gradient_norm *= 2;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto clipped = Decide(rank, clipping);
    ASSERT_TRUE(clipped.status.ok()) << clipped.status;
    EXPECT_TRUE(clipped.outcome.prepared);
    EXPECT_NE(clipped.outcome.digest, digest_);
    EXPECT_EQ(clipped.outcome.digest, ClippedVerdict(clipping).digest);
    EXPECT_EQ(clipped.outcome.gradient_norm, clipping.gradient_norm);
    EXPECT_TRUE(absl::IsFailedPrecondition(Decide(rank, other).status));
  }
  EXPECT_TRUE(IsClipped());
  EXPECT_EQ(committed_step(), 2);
  // A verdict about the step as it was comes too late.
  for (const Verdict late : {Verdict::kAbort, Verdict::kCommit}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(Decide(1, VerdictOf(late)).status));
  }
  const auto first = Decide(0, ClippedVerdict(clipping));
  ASSERT_TRUE(first.status.ok()) << first.status;
  EXPECT_FALSE(first.outcome.prepared);
  EXPECT_EQ(first.outcome.gradient_norm, clipping.gradient_norm);
  EXPECT_EQ(first.outcome.clip_coefficient, clipping.clip_coefficient);
  EXPECT_TRUE(Decide(1, ClippedVerdict(clipping)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
  EXPECT_TRUE(absl::IsFailedPrecondition(PreparedSums().status()));
  // Another norm comes too late.
  EXPECT_TRUE(absl::IsFailedPrecondition(Decide(0, other).status));
  EXPECT_TRUE(Decide(0, clipping).status.ok());
}

// The norm is of one attempt alone, also for the next engine.
TEST_P(ClippedStepTest, AnAbortedStepIsClippedAnew) {
  ASSERT_NO_FATAL_FAILURE(AttachWithSegments());
  StepVerdict clipping = ClippedAsOnOneNode(PrepareUnclipped());
  clipping.clip_coefficient /= 2;
  EXPECT_TRUE(Decide(0, clipping).status.ok());
  EXPECT_TRUE(IsClipped());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(
        Decide(rank, ClippedVerdict(clipping, Verdict::kAbort)).status.ok());
  }
  Prepare();
  EXPECT_FALSE(IsClipped());
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(segments_)).ok());
  EXPECT_FALSE(IsClipped());
  EXPECT_TRUE(
      harness_.job().DecideUnattached(VerdictOf(Verdict::kCommit)).ok());
  harness_.AttachAll();
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(ClippedStepTest, ANormThatIsNoneChangesNothing) {
  const StepOutcome prepared = PrepareUnclipped();
  const StepVerdict verdict = ClippedAsOnOneNode(prepared);
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double norm : {-1.0, inf, nan}) {
    StepVerdict bad = verdict;
    bad.gradient_norm = norm;
    EXPECT_TRUE(absl::IsInvalidArgument(Decide(0, bad).status)) << norm;
  }
  for (const double coefficient : {-1.0, 0.0, 1.5, nan}) {
    StepVerdict bad = verdict;
    bad.clip_coefficient = coefficient;
    EXPECT_TRUE(absl::IsInvalidArgument(Decide(0, bad).status)) << coefficient;
  }
  ASSERT_TRUE(Prepared().has_value());
  EXPECT_FALSE(IsClipped());
  EXPECT_TRUE(Decide(0, verdict).status.ok());
  EXPECT_TRUE(Decide(0, ClippedVerdict(verdict)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(ClippedStepTest, WhatANodeHasClippedIsNotClippedAnew) {
  const StepOutcome prepared = Prepare();
  const absl::Status refused = Decide(0, ClippedAsOnOneNode(prepared)).status;
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("max_norm"));
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kCommit)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// Ranks that are started without the other nodes know no norm, and may not know
// that there is to be one.
TEST_P(ClippedStepTest, IsNotCommittedBeforeTheNormIsNoted) {
  ASSERT_NO_FATAL_FAILURE(AttachWithSegments());
  const StepVerdict clipping = ClippedAsOnOneNode(PrepareUnclipped());
  const absl::Status early = Decide(0, VerdictOf(Verdict::kCommit)).status;
  EXPECT_TRUE(absl::IsFailedPrecondition(early)) << early;
  EXPECT_THAT(early.message(), HasSubstr("bring the norm first"));
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(segments_)).ok());
  const auto position = harness_.job().Position();
  ASSERT_TRUE(position.ok()) << position.status();
  EXPECT_TRUE(position->prepared_awaits_norm);
  EXPECT_FALSE(position->prepared_is_clipped);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      harness_.job().DecideUnattached(VerdictOf(Verdict::kCommit)).status()));
  EXPECT_EQ(committed_step(), 2);
  ASSERT_TRUE(harness_.job().DecideUnattached(clipping).ok());
  EXPECT_TRUE(harness_.job().Position()->prepared_awaits_norm);
  EXPECT_TRUE(harness_.job().DecideUnattached(ClippedVerdict(clipping)).ok());
  harness_.AttachAll();
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(ClippedStepTest, AStepOfOneNodeAwaitsNoNorm) {
  const StepOutcome prepared = Prepare();
  EXPECT_TRUE(prepared.prepared);
  EXPECT_FALSE(harness_.job().Position()->prepared_awaits_norm);
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kCommit)).status.ok());
}

TEST_P(ClippedStepTest, TheNextEngineClipsIt) {
  ASSERT_NO_FATAL_FAILURE(AttachWithSegments());
  const StepVerdict clipping = ClippedAsOnOneNode(PrepareUnclipped());
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(segments_)).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(PreparedSums().status()));
  const auto clipped = harness_.job().DecideUnattached(clipping);
  ASSERT_TRUE(clipped.ok()) << clipped.status();
  EXPECT_TRUE(clipped->prepared);
  const auto outcome =
      harness_.job().DecideUnattached(ClippedVerdict(clipping));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->clip_coefficient, clipping.clip_coefficient);
  harness_.AttachAll();
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(ClippedStepTest, TheNextEngineTakesItAsItWasClipped) {
  ASSERT_NO_FATAL_FAILURE(AttachWithSegments());
  const StepVerdict clipping = ClippedAsOnOneNode(PrepareUnclipped());
  EXPECT_TRUE(Decide(1, clipping).status.ok());
  harness_.Close();
  ASSERT_TRUE(harness_.OpenWith(std::move(segments_)).ok());
  EXPECT_TRUE(IsClipped());
  EXPECT_EQ(Prepared()->gradient_norm, clipping.gradient_norm);
  EXPECT_EQ(Prepared()->clip_coefficient, clipping.clip_coefficient);
  EXPECT_TRUE(harness_.job().DecideUnattached(clipping).ok());
  EXPECT_TRUE(harness_.job().DecideUnattached(ClippedVerdict(clipping)).ok());
  harness_.AttachAll();
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(ClippedStepTest, AnEngineThatDiesInItFinishesItAsItWasClipped) {
  DieIn([&] {
    Killer killer(Instant::kFirstRun);
    harness_.setup().observer = &killer;
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    const StepVerdict clipping = ClippedAsOnOneNode(PrepareUnclipped());
    Decide(0, clipping);
    Decide(0, ClippedVerdict(clipping));
  });
  ASSERT_NO_FATAL_FAILURE(FinishWithTheNextEngine());
}

// The engine dies between the norm and the mark: the step waits for its verdict
// as it was prepared, and is not clipped twice.
TEST_P(ClippedStepTest, ANormWithoutTheMarkIsForgotten) {
  StepVerdict verdict;
  {
    const StepOutcome prepared = PrepareUnclipped();
    verdict = ClippedAsOnOneNode(prepared);
    ASSERT_TRUE(Decide(0, VerdictOf(Verdict::kAbort)).status.ok());
  }
  DieIn([&] {
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    PrepareUnclipped();
    storage::persist_hook = [](storage::PersistPoint point) {
      if (point == storage::PersistPoint::kStepClipped) ::raise(SIGKILL);
    };
    Decide(0, verdict);
  });
  ASSERT_TRUE(harness_.Open().ok());
  ASSERT_TRUE(Prepared().has_value());
  EXPECT_EQ(Prepared()->clip_coefficient, 1);
  if (GetParam() == Case::kRanksLackGradients) {
    SetGradientsOfRanks(&harness_);
  } else {
    RememberGradients();
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.Register(rank).ok());
    ASSERT_TRUE(harness_.Attach(rank).ok());
  }
  EXPECT_TRUE(Decide(0, verdict).status.ok());
  EXPECT_TRUE(Decide(0, ClippedVerdict(verdict)).status.ok());
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

INSTANTIATE_TEST_SUITE_P(Cases, ClippedStepTest,
                         ::testing::Values(Case::kPlain, Case::kAccumulate,
                                           Case::kRanksLackGradients));

}  // namespace
}  // namespace optstate::session
