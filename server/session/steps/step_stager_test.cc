#include "server/session/steps/step_stager.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/step_rooms.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class StepStagerTest : public StepRoomFixture {
 protected:
  explicit StepStagerTest(const RegisterSpec& spec = TwoRankSpec())
      : StepRoomFixture(spec) {}

  // Returns the norm of the gradients of both parameters, as they were staged.
  double Norm() {
    const std::vector<uint8_t> updated(2, 1);
    return std::sqrt(decider_.SumOfSquares(updated));
  }
  // Returns what the rank finds staged: "FIRST+COUNT at MICRO_STEP".
  std::vector<std::string> StagedOf(uint32_t rank) {
    std::vector<std::string> texts;
    for (const StagedRange& range : stager_.StagedRanges(rank)) {
      texts.push_back(absl::StrCat(range.first_piece, "+", range.piece_count,
                                   " at ", range.micro_step));
    }
    return texts;
  }
  // Opens the step anew, as the next engine does.
  void Restart() {
    ForgetSessions();
    EXPECT_TRUE(registrar_.UseShape(*MakeShape(job_.shape->description)).ok());
    stager_.RestoreStaged();
  }
};

TEST_F(StepStagerTest, TakesTheStatisticsOfWhatIsPushed) {
  ASSERT_TRUE(Push(0, 0, 2).ok());  // it has "a" alone
  EXPECT_EQ(job_.rank_mark(0).step, 1u);
  EXPECT_EQ(job_.rank_mark(1).step, 0u);
  EXPECT_EQ(Norm(), std::sqrt(3));
  ASSERT_TRUE(Push(1, 1, 2).ok());
  EXPECT_EQ(Norm(), std::sqrt(3 + 3 * 4));
  // Used in place: what is pushed again counts as it is now.
  for (float& value : areas_[0]) value = 5;
  ASSERT_TRUE(Push(0, 0, 1).ok());
  EXPECT_EQ(Norm(), std::sqrt(3 * 25 + 3 * 4));
}

TEST_F(StepStagerTest, ARefusedPushChangesNothing) {
  ASSERT_TRUE(Push(0, 0, 1).ok());
  for (float& value : areas_[0]) value = 5;
  EXPECT_EQ(Push(0, 0, 1, /*micro_step=*/1).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Norm(), std::sqrt(3));
}

TEST_F(StepStagerTest, DropsWhatTheRankHasStagedAndItsCommit) {
  ASSERT_TRUE(Push(0, 0, 1).ok());
  ASSERT_TRUE(Push(1, 1, 2).ok());
  NoteCommit(0, 10);
  stager_.DropStaged(0);
  EXPECT_EQ(job_.rank_mark(0).step, 0u);
  EXPECT_EQ(job_.rank_mark(1).step, 1u);
  EXPECT_FALSE(step_.open_step.opened_by(0));
  EXPECT_TRUE(step_.open_step.opened_by(1));
}

class ReplicatedStagerTest : public StepStagerTest {
 protected:
  ReplicatedStagerTest()
      : StepStagerTest(ReplicatedSpec(3, /*accumulate=*/false)) {}
};

// Rank 1 has a gradient of "b" alone.
TEST_F(ReplicatedStagerTest, SumsThoseOfTheRanksThatHavePushed) {
  ASSERT_TRUE(Push(0, 0, 1).ok());
  ASSERT_TRUE(Push(1, 1, 2).ok());
  ASSERT_TRUE(Push(2, 0, 2).ok());
  EXPECT_EQ(Norm(), 0) << "more may come";
  for (uint32_t rank = 0; rank < 3; ++rank) NoteCommit(rank, 10 + rank);
  absl::Span<const uint8_t> updated;
  ASSERT_TRUE(stager_.ResolveParameters(&updated).ok());
  EXPECT_THAT(updated, ElementsAre(1, 1));
  stager_.StagePartial();
  EXPECT_EQ(Norm(), std::sqrt(3 * (1 + 3) * (1 + 3) + 3 * (2 + 3) * (2 + 3)));
}

TEST_F(ReplicatedStagerTest, StagesNothingAgainWhenNoneIsMissing) {
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(Push(rank, 0, 1).ok());
  absl::Span<const uint8_t> updated;
  ASSERT_TRUE(stager_.ResolveParameters(&updated).ok());
  EXPECT_THAT(updated, ElementsAre(1, 0));
  for (float& value : areas_[0]) value = 50;
  stager_.StagePartial();
  EXPECT_EQ(Norm(), std::sqrt(3 * 36));
}

// Each rank has its own parameter, whose micro-steps are summed.
class AccumulatingStagerTest : public StepStagerTest {
 protected:
  static RegisterSpec Accumulating() {
    RegisterSpec spec = TwoRankSpec();
    spec.accumulate = true;
    return spec;
  }
  AccumulatingStagerTest() : StepStagerTest(Accumulating()) {}
};

TEST_F(AccumulatingStagerTest, TheNextEngineFindsWhatIsStaged) {
  ASSERT_TRUE(Push(0, 0, 1, 0).ok());
  ASSERT_TRUE(Push(0, 0, 1, 2).ok());
  ASSERT_TRUE(Push(1, 1, 2, 0).ok());
  stager_.DropStaged(1);
  ASSERT_NO_FATAL_FAILURE(Restart());
  EXPECT_THAT(StagedOf(0), ElementsAre("0+1 at 2"));
  EXPECT_THAT(StagedOf(1), IsEmpty()) << "it was dropped";
  EXPECT_EQ(Norm(), std::sqrt(3 * 4));
}

TEST_F(AccumulatingStagerTest, ButNotWhatWasOfAStepThatIsTaken) {
  ASSERT_TRUE(Push(0, 0, 1).ok());
  storage::StepRecord record = job_.record();
  record.committed_step = 1;
  storage::PublishRecord(record, job_.tier->control());
  ASSERT_NO_FATAL_FAILURE(Restart());
  EXPECT_FALSE(step_.open_step.any());
}

class TogetherStagerTest : public StepStagerTest {
 protected:
  TogetherStagerTest()
      : StepStagerTest(ReplicatedSpec(2, /*accumulate=*/true)) {}
};

// A rank finds staged what is summed, of whichever rank.
TEST_F(TogetherStagerTest, ReportsTheSums) {
  for (uint32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(Push(rank, 0, 2).ok());
  EXPECT_THAT(StagedOf(1), ElementsAre("0+2 at 0"));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(Push(rank, 1, 2, 3).ok());
  }
  ASSERT_TRUE(Push(0, 0, 1, 3).ok());  // of one rank alone
  EXPECT_THAT(StagedOf(1), ElementsAre("0+1 at 0", "1+1 at 3"));
  absl::Span<const uint8_t> updated;
  ASSERT_TRUE(stager_.ResolveParameters(&updated).ok());
  EXPECT_THAT(updated, ElementsAre(1, 1));
  stager_.DropStaged(0);
  EXPECT_THAT(StagedOf(1), IsEmpty());
}

}  // namespace
}  // namespace optstate::session
