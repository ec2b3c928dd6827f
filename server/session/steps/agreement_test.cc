#include "server/session/steps/agreement.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class AgreementTest : public UpperRoomFixture {
 protected:
  AgreementTest()
      : UpperRoomFixture(ReplicatedSpec(3, /*accumulate=*/true)),
        agreement_({.job = &job_,
                    .ranks = &ranks_,
                    .step = &step_,
                    .sums = &sums_,
                    .stager = &stager_,
                    .load = &load_,
                    .rounds = &rounds_}) {}

  absl::Status AgreeToCommit(uint32_t rank) {
    return agreement_.AgreeToStep(rank, "has committed");
  }
  static void ExpectTold(const absl::Status& status, const char* what) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("the ranks disagree"),
                      HasSubstr("rank 0 has begun a load"), HasSubstr(what)));
  }

  Agreement agreement_;
};

TEST_F(AgreementTest, RanksThatAllStepOrAllLoadAgree) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  NoteCommit(0, 10);
  EXPECT_TRUE(AgreeToCommit(1).ok());
  step_.open_step.DropAll();
  load_.round.Begin(0);
  EXPECT_TRUE(agreement_.AgreeToLoad(1).ok());
  EXPECT_TRUE(agreement_.AgreeToLoad(0).ok());
  EXPECT_TRUE(load_.round.begun(0));
}

// A rank's own commit does not stop its load: the call does.
TEST_F(AgreementTest, ARankDoesNotDisagreeWithItself) {
  NoteCommit(0, 10);
  EXPECT_TRUE(agreement_.AgreeToLoad(0).ok());
  EXPECT_TRUE(sums_.IsWaiting(0));
}

TEST_F(AgreementTest, ACommitBesideALoadEndsBoth) {
  load_.round.Begin(0);
  load_.round.Finish(0, 5, {});
  ASSERT_TRUE(Push(1, 0, 2).ok());
  ASSERT_TRUE(Push(2, 0, 2).ok());
  ExpectTold(AgreeToCommit(1), "rank 1 has committed step 1");
  ExpectTold(AnswerTo(0, 5), "rank 1 has committed step 1");
  EXPECT_FALSE(load_.round.active());
  EXPECT_FALSE(step_.open_step.opened_by(1));
  // Rank 2 is notified in the call in which it would wait, once.
  EXPECT_EQ(listeners_[2]->answer_count(), 0u);
  ExpectTold(AgreeToCommit(2), "rank 1 has committed step 1");
  EXPECT_FALSE(step_.open_step.any());
  EXPECT_TRUE(AgreeToCommit(2).ok());
  EXPECT_TRUE(AgreeToCommit(1).ok()) << "it has had its answer";
}

TEST_F(AgreementTest, ALoadBesideStepsAnswersAllThatWait) {
  ASSERT_TRUE(Push(1, 0, 2).ok());
  NoteCommit(1, 11);
  ASSERT_TRUE(Push(2, 0, 2).ok());
  NoteEnding(2, 12);
  const absl::Status told = agreement_.AgreeToLoad(0);
  ExpectTold(told, "rank 1 has committed step 1");
  EXPECT_EQ(AnswerTo(1, 11), told);
  EXPECT_EQ(AnswerTo(2, 12), told);
  EXPECT_FALSE(step_.open_step.any());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(agreement_.AgreeToLoad(rank).ok()) << "all have been told";
  }
}

TEST_F(AgreementTest, TheEndOfAMicroStepIsNamed) {
  NoteEnding(1, 11);
  ExpectTold(agreement_.AgreeToLoad(0), "rank 1 has ended a micro-step of");
}

TEST_F(AgreementTest, ARankThatIsAwayIsNotTold) {
  NoteCommit(1, 11);
  ranks_.Leave(2);
  EXPECT_FALSE(agreement_.AgreeToLoad(0).ok());
  AttachRank(2);
  EXPECT_TRUE(agreement_.AgreeToLoad(2).ok());
}

// Each rank's drop voids the sums of the others, which have been told.
TEST_F(AgreementTest, SumsAreVoidForAllAndEachAnswerComesOnce) {
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(Push(rank, 0, 1).ok());
  ASSERT_TRUE(step_.micro_steps.any_summed());
  NoteCommit(1, 11);
  NoteCommit(2, 12);
  const absl::Status told = agreement_.AgreeToLoad(0);
  EXPECT_FALSE(told.ok());
  EXPECT_EQ(AnswerTo(1, 11), told);
  EXPECT_EQ(AnswerTo(2, 12), told);
  EXPECT_FALSE(step_.micro_steps.any_summed());
  EXPECT_FALSE(step_.open_step.any());
}

}  // namespace
}  // namespace optstate::session
