#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/steps/speculator.h"
#include "server/session/testing/step_rooms.h"

namespace optstate::session {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::Lt;

class SpeculatorTest : public StepRoomFixture {
 protected:
  static RegisterSpec Speculative(RegisterSpec spec = TwoRankSpec()) {
    spec.speculative = true;
    return spec;
  }
  explicit SpeculatorTest(const RegisterSpec& spec = Speculative())
      : StepRoomFixture(spec), changed_(groups_) {
    changed_[0][adam::kLr] = changed_[1][adam::kLr] = 0.5;
  }

  static StepDecision PlainDecision() {
    StepDecision decision;
    decision.outcome.applied = true;
    return decision;
  }
  // Notes commits that are equal to CommitOf() until the next is foreseen.
  void Settle() {
    JobCall lock(&job_.lock);
    for (int i = 0; i < ForeseenCommit::kSteps; ++i) {
      ASSERT_TRUE(
          speculator_.PrepareForDecision(PlainDecision(), CommitOf(1)).ok());
    }
  }
  absl::Status PushAgain(uint32_t rank, uint32_t first, uint32_t end) {
    JobCall lock(&job_.lock);
    return Push(rank, first, end);
  }
  bool SpeculateOnPushed() {
    JobCall lock(&job_.lock);
    return speculator_.SpeculateOnPushed();
  }
  // Has rank 0 commit, and begins what is known then.
  void CommitFirst(const std::vector<Hyperparams>& groups) {
    CommitSpec spec = CommitOf(1);
    spec.groups = groups;
    step_.open_step.NoteCommit(0, 1, spec);
    JobCall lock(&job_.lock);
    speculator_.Speculate(0);
  }
  absl::Status Prepare(const StepDecision& decision,
                       const std::vector<Hyperparams>& groups) {
    CommitSpec spec = CommitOf(1);
    spec.groups = groups;
    JobCall lock(&job_.lock);
    return speculator_.PrepareForDecision(decision, spec);
  }
  // Pushes all that the ranks have, and begins the step as it is foreseen.
  void BeginAll() {
    ASSERT_NO_FATAL_FAILURE(Settle());
    ASSERT_TRUE(Push(0, 0, 2).ok());
    ASSERT_TRUE(Push(1, 0, 2).ok());
    SpeculateOnPushed();
    ASSERT_THAT(FirstElements(), Each(Lt(0)));
  }

  std::vector<Hyperparams> changed_;  // other learning rates than groups_
};

TEST_F(SpeculatorTest, BeginsWhatIsPushedWhenAllRanksAreInTheStep) {
  ASSERT_NO_FATAL_FAILURE(Settle());
  ASSERT_TRUE(Push(0, 0, 2).ok());
  EXPECT_FALSE(SpeculateOnPushed());
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
  ASSERT_TRUE(Push(1, 0, 2).ok());
  EXPECT_FALSE(SpeculateOnPushed());  // all at once
  EXPECT_THAT(FirstElements(), Each(Lt(0)));
  EXPECT_EQ(job_.tier->control()->step_speculated, 1u);
}

TEST_F(SpeculatorTest, NothingThatIsNotForeseen) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  ASSERT_TRUE(Push(1, 0, 2).ok());
  SpeculateOnPushed();
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

TEST_F(SpeculatorTest, NothingThatIsToBeSkipped) {
  ASSERT_NO_FATAL_FAILURE(Settle());
  areas_[0][0] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(Push(0, 0, 2).ok());
  ASSERT_TRUE(Push(1, 0, 2).ok());
  SpeculateOnPushed();
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

TEST_F(SpeculatorTest, APushOfWhatIsBegunTakesItBack) {
  ASSERT_NO_FATAL_FAILURE(BeginAll());
  ASSERT_TRUE(PushAgain(0, 0, 1).ok());
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
  SpeculateOnPushed();
  EXPECT_THAT(FirstElements(), Each(Lt(0)));
}

TEST_F(SpeculatorTest, ACommitThatSaysOtherwiseTakesAGuessBack) {
  ASSERT_NO_FATAL_FAILURE(BeginAll());
  CommitFirst(changed_);
  // The part of rank 0 is begun anew, as it has said.
  EXPECT_THAT(FirstElements(), ElementsAre(FloatEq(-0.5F), 0));
  // The begun part is no guess any more.
  ASSERT_TRUE(Prepare(PlainDecision(), changed_).ok());
  EXPECT_THAT(FirstElements(), ElementsAre(FloatEq(-0.5F), 0));
}

TEST_F(SpeculatorTest, ACommitThatSaysTheSameLeavesIt) {
  ASSERT_NO_FATAL_FAILURE(BeginAll());
  const std::vector<float> begun = FirstElements();
  CommitFirst(groups_);
  EXPECT_EQ(FirstElements(), begun);
  // The begun part is a guess still: the other rank may disagree, and the step
  // be taken again with another commit.
  ASSERT_TRUE(Prepare(PlainDecision(), changed_).ok());
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

TEST_F(SpeculatorTest, UnequalCommitsBeginNothing) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  ASSERT_TRUE(Push(1, 0, 2).ok());
  NoteCommit(1, 11);
  CommitFirst(changed_);
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
  SpeculateOnPushed();
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

TEST_F(SpeculatorTest, ADecisionAsForeseenLeavesIt) {
  ASSERT_NO_FATAL_FAILURE(BeginAll());
  const std::vector<float> begun = FirstElements();
  ASSERT_TRUE(Prepare(PlainDecision(), groups_).ok());
  EXPECT_EQ(FirstElements(), begun);
}

TEST_F(SpeculatorTest, AnyOtherDecisionTakesItBack) {
  StepDecision skipped = PlainDecision();
  skipped.outcome.applied = false;
  StepDecision clipped = PlainDecision();
  clipped.clipped = true;
  for (const StepDecision& decision : {skipped, clipped}) {
    ASSERT_NO_FATAL_FAILURE(BeginAll());
    ASSERT_TRUE(Prepare(decision, groups_).ok());
    EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
  }
  ASSERT_NO_FATAL_FAILURE(BeginAll());
  ASSERT_TRUE(Prepare(PlainDecision(), changed_).ok());
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

// Both ranks have gradients of both parameters.
class ReplicatedSpeculatorTest : public SpeculatorTest {
 protected:
  ReplicatedSpeculatorTest()
      : SpeculatorTest(Speculative(ReplicatedSpec(2, /*accumulate=*/false))) {}
};

TEST_F(ReplicatedSpeculatorTest, APushOfAnotherParameterLeavesIt) {
  ASSERT_NO_FATAL_FAILURE(Settle());
  ASSERT_TRUE(Push(0, 0, 1).ok());
  ASSERT_TRUE(Push(1, 0, 1).ok());
  SpeculateOnPushed();
  EXPECT_THAT(FirstElements(), ElementsAre(Lt(0), 0));
  const float begun = FirstElements()[0];
  ASSERT_TRUE(PushAgain(0, 1, 2).ok());
  EXPECT_THAT(FirstElements(), ElementsAre(begun, 0));
  ASSERT_TRUE(PushAgain(1, 1, 2).ok());
  SpeculateOnPushed();
  EXPECT_THAT(FirstElements(), ElementsAre(begun, Lt(0)));
}

}  // namespace
}  // namespace optstate::session
