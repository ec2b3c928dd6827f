#include "server/session/steps/step_preparer.h"

#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::Each;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::Lt;

class StepPreparerTest : public UpperRoomFixture {
 protected:
  // Prepares step 1; returns its digest.
  uint64_t Prepare() {
    absl::Span<const uint8_t> updated;
    const StepDecision decision = DecideStep(&updated);
    JobCall lock(&job_.lock);
    preparer_.Prepare(decision, updated);
    return preparer_.PreparedOutcome().digest;
  }
  // Returns the answer to rank 0.
  absl::Status Decide(const StepVerdict& verdict) {
    JobCall lock(&job_.lock);
    preparer_.Decide(0, ++last_request_, verdict);
    return AnswerTo(0, last_request_);
  }
  absl::StatusOr<StepOutcome> DecideUnattached(const StepVerdict& verdict) {
    JobCall lock(&job_.lock);
    return preparer_.DecideUnattached(verdict);
  }
  uint64_t committed_step() const { return job_.record().committed_step; }

  uint64_t last_request_ = 100;
};

TEST_F(StepPreparerTest, APreparedStepWaitsForItsVerdict) {
  const uint64_t digest = Prepare();
  EXPECT_EQ(step_.progress.phase(), StepPhase::kPrepared);
  EXPECT_TRUE(preparer_.PreparedOutcome().prepared);
  EXPECT_NE(digest, 0u);
  EXPECT_EQ(committed_step(), 0u);
  EXPECT_THAT(FirstElements(), Each(Eq(0)));
  const auto position = preparer_.Position();
  ASSERT_TRUE(position.ok()) << position.status();
  EXPECT_EQ(position->committed_step, 0u);
  ASSERT_TRUE(position->prepared.has_value());
  EXPECT_EQ(position->prepared->digest, digest);
  EXPECT_FALSE(position->prepared_is_clipped);
}

TEST_F(StepPreparerTest, AVerdictTakesTheStepOnce) {
  const StepVerdict commit = {.step = 1, .digest = Prepare()};
  EXPECT_TRUE(Decide(commit).ok());
  EXPECT_EQ(committed_step(), 1u);
  EXPECT_THAT(FirstElements(), Each(Lt(0)));
  EXPECT_FALSE(preparer_.Position()->prepared.has_value());
  EXPECT_TRUE(Decide(commit).ok());
  EXPECT_EQ(committed_step(), 1u);
}

TEST_F(StepPreparerTest, AnAbortedStepIsGone) {
  StepVerdict verdict = {
      .step = 1, .digest = Prepare(), .verdict = Verdict::kAbort};
  EXPECT_TRUE(Decide(verdict).ok());
  EXPECT_EQ(step_.progress.phase(), StepPhase::kNone);
  EXPECT_THAT(FirstElements(), Each(Eq(0)));
  verdict.verdict = Verdict::kCommit;
  EXPECT_TRUE(absl::IsFailedPrecondition(Decide(verdict)));
}

TEST_F(StepPreparerTest, ASkippedStepHasItsNumber) {
  EXPECT_TRUE(
      Decide({.step = 1, .digest = Prepare(), .verdict = Verdict::kSkip}).ok());
  EXPECT_EQ(committed_step(), 1u);
  EXPECT_TRUE(job_.LastOutcome().found_inf);
  EXPECT_THAT(FirstElements(), Each(Eq(0)));
}

TEST_F(StepPreparerTest, AClippedStepHasAnotherDigest) {
  StepVerdict clip = {.step = 1,
                      .digest = Prepare(),
                      .verdict = Verdict::kClip,
                      .gradient_norm = 8,
                      .clip_coefficient = 0.25};
  EXPECT_TRUE(Decide(clip).ok());
  EXPECT_TRUE(preparer_.Position()->prepared_is_clipped);
  EXPECT_EQ(preparer_.PreparedOutcome().gradient_norm, 8);
  const uint64_t digest = preparer_.PreparedOutcome().digest;
  EXPECT_EQ(digest, ClippedDigest(clip.digest, 8, 0.25));
  EXPECT_TRUE(Decide(clip).ok()) << "a repeat";
  const absl::Status late = Decide({.step = 1, .digest = clip.digest});
  EXPECT_TRUE(absl::IsFailedPrecondition(late));
  EXPECT_THAT(late.message(), HasSubstr("the norm of all nodes already"));
  EXPECT_TRUE(Decide({.step = 1, .digest = digest}).ok());
  EXPECT_EQ(job_.LastOutcome().clip_coefficient, 0.25);
  EXPECT_EQ(committed_step(), 1u);
}

TEST_F(StepPreparerTest, OnlyAttachedRanksDecideWhileThereAreSome) {
  const StepVerdict commit = {.step = 1, .digest = Prepare()};
  EXPECT_TRUE(absl::IsUnavailable(DecideUnattached(commit).status()));
  EXPECT_EQ(committed_step(), 0u);
}

TEST_F(StepPreparerTest, NothingIsPreparedHere) {
  for (const Verdict verdict :
       {Verdict::kCommit, Verdict::kSkip, Verdict::kClip}) {
    const absl::Status refused =
        Decide({.step = 1, .digest = 5, .verdict = verdict});
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(refused.message(), HasSubstr("is not prepared here"));
  }
  // It may come to a node that never prepared the step.
  EXPECT_TRUE(
      Decide({.step = 1, .digest = 5, .verdict = Verdict::kAbort}).ok());
}

}  // namespace
}  // namespace optstate::session
