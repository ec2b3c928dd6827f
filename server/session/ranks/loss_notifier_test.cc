#include "server/session/ranks/loss_notifier.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/step_rooms.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kNotice[] = "rank 1 lost at step 1, waiting for its return";

// Three ranks, of which rank 1 is lost in step 1.
class LossNotifierTest : public StepRoomFixture {
 protected:
  LossNotifierTest()
      : StepRoomFixture(ReplicatedSpec(3, /*accumulate=*/true)),
        losses_({.job = &job_,
                 .ranks = &ranks_,
                 .step = &step_,
                 .sums = &sums_,
                 .stager = &stager_}) {}

  void AbortOnLoss() {
    job_.options.config.mutable_engine()->set_on_rank_loss(v1::RANK_LOSS_ABORT);
  }
  // Marks rank 1 as lost in the step, no rank having been told.
  void Lose(uint64_t step = 1) {
    ranks_.losses().Note(1, step, /*in_open_step=*/true);
  }
  bool is_acknowledged() {
    return ranks_.losses().state(1) == LossState::kAcknowledged;
  }
  void ExpectAborted(uint32_t rank, uint64_t request_id) {
    const absl::Status answer = AnswerTo(rank, request_id);
    EXPECT_EQ(answer.code(), absl::StatusCode::kAborted) << answer;
    EXPECT_THAT(answer.message(), HasSubstr("rank 1 lost at step 1"));
    EXPECT_FALSE(sums_.IsWaiting(rank));
    EXPECT_FALSE(step_.open_step.opened_by(rank));
  }

  LossNotifier losses_;
};

TEST_F(LossNotifierTest, WaitingRanksGetANotice) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  NoteCommit(0, 10);
  Lose();
  losses_.NotifyRankLost(1);
  EXPECT_THAT(listeners_[0]->notices(), ElementsAre(kNotice));
  EXPECT_THAT(listeners_[2]->notices(), IsEmpty());
  EXPECT_EQ(listeners_[0]->answer_count(), 0u);
  EXPECT_TRUE(step_.open_step.opened_by(0));
  losses_.NoteAcknowledged(0);
  EXPECT_FALSE(is_acknowledged()) << "a notice is no answer";
}

TEST_F(LossNotifierTest, OrAreAborted) {
  AbortOnLoss();
  ASSERT_TRUE(Push(0, 0, 2).ok());
  NoteCommit(0, 10);
  ASSERT_TRUE(Push(2, 0, 1).ok());
  Lose();
  losses_.NotifyRankLost(1);
  ExpectAborted(0, 10);
  EXPECT_EQ(listeners_[2]->answer_count(), 0u);
  EXPECT_TRUE(step_.open_step.opened_by(2)) << "it does not wait";
  EXPECT_THAT(listeners_[0]->notices(), IsEmpty());
}

TEST_F(LossNotifierTest, ARankThatEndsAMicroStepWaitsToo) {
  AbortOnLoss();
  ASSERT_TRUE(Push(2, 0, 2).ok());
  NoteEnding(2, 20);
  Lose();
  losses_.NotifyRankLost(1);
  ExpectAborted(2, 20);
}

TEST_F(LossNotifierTest, OnlyTheNextCallOfAnAbortedRankAcknowledgesTheLoss) {
  AbortOnLoss();
  NoteCommit(0, 10);
  Lose();
  losses_.NotifyRankLost(1);
  losses_.NoteAcknowledged(2);
  losses_.NoteAcknowledged(7);  // no rank
  EXPECT_FALSE(is_acknowledged());
  losses_.NoteAcknowledged(0);
  EXPECT_TRUE(is_acknowledged());
  // A rank is notified once of a loss; a later loss is another one.
  Lose(/*step=*/2);
  losses_.NoteAcknowledged(0);
  EXPECT_FALSE(is_acknowledged());
}

TEST_F(LossNotifierTest, ARankThatBeginsToWaitIsAbortedForALossThatNoneKnows) {
  AbortOnLoss();
  Lose();
  NoteCommit(0, 10);
  losses_.NotifyExistingLosses(0);
  ExpectAborted(0, 10);
  // The next one is not: one rank to take the step again is enough.
  NoteCommit(2, 20);
  losses_.NotifyExistingLosses(2);
  EXPECT_EQ(listeners_[2]->answer_count(), 0u);
  EXPECT_THAT(listeners_[2]->notices(), ElementsAre(kNotice));
}

TEST_F(LossNotifierTest, ItGetsANoticeOfOneThatIsKnown) {
  AbortOnLoss();
  Lose();
  ranks_.losses().NoteAcknowledged(1);
  NoteCommit(0, 10);
  losses_.NotifyExistingLosses(0);
  EXPECT_THAT(listeners_[0]->notices(), ElementsAre(kNotice));
  EXPECT_TRUE(sums_.IsWaiting(0));
}

// The ranks have had answers since the step of the loss.
TEST_F(LossNotifierTest, NobodyIsAbortedForALossInAnEarlierStep) {
  AbortOnLoss();
  storage::StepRecord record = job_.record();
  record.committed_step = 1;
  storage::PublishRecord(record, job_.tier->control());
  Lose(/*step=*/1);
  NoteCommit(0, 10);
  losses_.NotifyExistingLosses(0);
  EXPECT_THAT(listeners_[0]->notices(), ElementsAre(kNotice));
  EXPECT_TRUE(sums_.IsWaiting(0));
}

}  // namespace
}  // namespace optstate::session
