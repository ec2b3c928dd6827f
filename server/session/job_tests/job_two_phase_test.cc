// Steps that are prepared, and taken when all nodes have decided.

#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/status_macros.h"
#include "server/session/testing/job_crash_fixture.h"
#include "storage/persist_in_order.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TwoPhaseTest : public JobCrashTest,
                     public ::testing::WithParamInterface<Case> {
 protected:
  TwoPhaseTest() : JobCrashTest(TwoRanks(GetParam())) {}

  CommitSpec TwoPhaseCommit() const {
    CommitSpec spec = CommitOf(3);
    spec.two_phase = true;
    return spec;
  }
  // Prepares step 3 without the max_norm that it has on one node.
  StepOutcome PrepareUnclipped() {
    CommitSpec spec = TwoPhaseCommit();
    spec.max_norm = 0;
    return Prepare(spec);
  }
  StepOutcome Prepare() { return Prepare(TwoPhaseCommit()); }
  StepOutcome Prepare(const CommitSpec& spec) {
    PushStep3(&harness_);
    const RecordingListener::Answer answer = harness_.CommitAll(spec);
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_TRUE(answer.outcome.prepared);
    EXPECT_NE(answer.outcome.digest, 0u);
    digest_ = answer.outcome.digest;
    return answer.outcome;
  }
  StepVerdict VerdictOf(Verdict verdict) const {
    return {.step = 3, .digest = digest_, .verdict = verdict};
  }
  // Returns the clipping with which the step is what it is on one node.
  StepVerdict ClippedAsOnOneNode(const StepOutcome& prepared) const {
    StepVerdict verdict = VerdictOf(Verdict::kClip);
    verdict.gradient_norm = prepared.gradient_norm;
    verdict.clip_coefficient =
        CommitOf(3).max_norm / (prepared.gradient_norm + 1e-6);
    return verdict;
  }
  // Returns the verdict about the step that is clipped so.
  StepVerdict ClippedVerdict(const StepVerdict& clipping,
                             Verdict verdict = Verdict::kCommit) const {
    return {.step = 3,
            .digest = ClippedDigest(digest_, clipping.gradient_norm,
                                    clipping.clip_coefficient),
            .verdict = verdict};
  }
  // Returns the sums of squares of the prepared step, by parameter.
  absl::StatusOr<std::vector<double>> PreparedSums() {
    std::vector<double> sums(3);
    OPTSTATE_RETURN_IF_ERROR(
        harness_.job()
            .Fetch(v1::STATE_ARRAY_PREPARED_SUM, 0, 0, sums.size(),
                   absl::MakeSpan(reinterpret_cast<std::byte*>(sums.data()),
                                  sums.size() * sizeof(double)))
            .status());
    return sums;
  }
  // Returns the answer to the rank, which must have come.
  RecordingListener::Answer Decide(uint32_t rank, const StepVerdict& verdict) {
    const uint64_t request = 1000 + next_request_++;
    harness_.job().Decide(rank, request, verdict);
    const auto* answer = harness_.AnswerTo(rank, request);
    EXPECT_NE(answer, nullptr);
    return answer == nullptr ? RecordingListener::Answer() : *answer;
  }
  std::optional<StepOutcome> Prepared() {
    const auto position = harness_.job().Position();
    EXPECT_TRUE(position.ok()) << position.status();
    return position.ok() ? position->prepared : std::nullopt;
  }
  bool IsClipped() {
    const auto position = harness_.job().Position();
    return position.ok() && position->prepared_is_clipped;
  }
  // Attaches all ranks, each with the gradients of step 3 in a segment.
  void AttachWithSegments() {
    harness_.DetachAll();
    if (GetParam() == Case::kRanksLackGradients) {
      SetGradientsOfRanks(&harness_);
    } else {
      RememberGradients();
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(harness_.Register(rank).ok());
      segments_.push_back(harness_.KeepGradients(rank, 4096));
      AttachSpec spec = harness_.AttachSpecOf(rank);
      spec.gradient_segment = segments_.back().segment.get();
      spec.gradient_offset_bytes = segments_.back().gradient_offset_bytes;
      ASSERT_TRUE(harness_.job().Attach(spec).ok());
    }
  }

  // Has another engine finish step 3 as on one node.
  void FinishWithTheNextEngine() {
    ASSERT_TRUE(harness_.Open().ok());
    if (GetParam() == Case::kRanksLackGradients) {
      SetGradientsOfRanks(&harness_);
    } else {
      RememberGradients();
    }
    const bool needs_gradients = GetParam() != Case::kAccumulate;
    EXPECT_EQ(absl::IsUnavailable(harness_.job().Position().status()),
              needs_gradients);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(harness_.Register(rank).ok());
      ASSERT_TRUE(harness_.Attach(rank).ok());
    }
    EXPECT_EQ(committed_step(), 3);
    EXPECT_TRUE(harness_.StateBytes() == expected_);
  }

  std::vector<KeptGradients> segments_;  // by rank
  uint64_t digest_ = 0;
  uint64_t next_request_ = 0;
};

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

TEST_P(TwoPhaseTest, IsClippedByTheNormOfAllNodes) {
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
  EXPECT_TRUE(harness_.StateBytes() == committed_);
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
  // It is too late for another norm.
  EXPECT_TRUE(absl::IsFailedPrecondition(Decide(0, other).status));
  EXPECT_TRUE(Decide(0, clipping).status.ok());
}

// The norm is of one attempt alone, also for the next engine.
TEST_P(TwoPhaseTest, AnAbortedStepIsClippedAnew) {
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

TEST_P(TwoPhaseTest, ANormThatIsNoneChangesNothing) {
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

TEST_P(TwoPhaseTest, WhatANodeHasClippedIsNotClippedAnew) {
  const StepOutcome prepared = Prepare();
  const absl::Status refused = Decide(0, ClippedAsOnOneNode(prepared)).status;
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("max_norm"));
  EXPECT_TRUE(Decide(0, VerdictOf(Verdict::kCommit)).status.ok());
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

TEST_P(TwoPhaseTest, TheNextEngineClipsIt) {
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

TEST_P(TwoPhaseTest, TheNextEngineTakesItAsItWasClipped) {
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
  // It is too late for another one.
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

TEST_P(TwoPhaseTest, AnEngineThatDiesInItFinishesItAsItWasClipped) {
  DieIn([&] {
    Killer killer(Instant::kFirstRun);
    harness_.setup().observer = &killer;
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    Decide(0, ClippedAsOnOneNode(PrepareUnclipped()));
  });
  ASSERT_NO_FATAL_FAILURE(FinishWithTheNextEngine());
}
// The engine dies between the norm and the mark: the step waits for its verdict
// as it was prepared, and is not clipped twice.
TEST_P(TwoPhaseTest, ANormWithoutTheMarkIsForgotten) {
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
      if (point == storage::PersistPoint::kStepInProgress) ::raise(SIGKILL);
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
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
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
