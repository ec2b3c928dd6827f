#include "server/session/ranks/rank_losses.h"

#include "gtest/gtest.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {
namespace {

class RankLossesTest : public RoomFixture {
 protected:
  RankLossesTest() { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
  // A new engine knows the marks alone.
  void ReplaceEngine() { losses_.Reset(); }

  RankLosses losses_{&job_};
};

TEST_F(RankLossesTest, IsNotifiedThenAcknowledged) {
  EXPECT_EQ(losses_.state(1), LossState::kNone);
  EXPECT_FALSE(losses_.IsUnacknowledged(1));
  losses_.Note(1, 5, /*in_open_step=*/true);
  EXPECT_EQ(losses_.state(1), LossState::kNotNotified);
  EXPECT_TRUE(losses_.IsUnacknowledged(1));
  losses_.NoteNotified(1);
  EXPECT_EQ(losses_.state(1), LossState::kNotified);
  EXPECT_TRUE(losses_.IsUnacknowledged(1));
  losses_.NoteAcknowledged(1);
  EXPECT_EQ(losses_.state(1), LossState::kAcknowledged);
  EXPECT_FALSE(losses_.IsUnacknowledged(1));
  EXPECT_EQ(job_.rank_mark(1).lost_at_step, 5u);
  losses_.Forget(1);
  EXPECT_EQ(losses_.state(1), LossState::kNone);
  EXPECT_EQ(job_.rank_mark(1).lost_at_step, 0u);
  losses_.Forget(1);  // no effect
  EXPECT_EQ(losses_.state(0), LossState::kNone);
}

TEST_F(RankLossesTest, BetweenTwoStepsThereIsNothingToAcknowledge) {
  losses_.Note(1, 5, /*in_open_step=*/false);
  EXPECT_EQ(losses_.state(1), LossState::kAcknowledged);
}

// The aborted rank may never have had its answer.
TEST_F(RankLossesTest, TheNextEngineNotifiesAgainUnlessItIsAcknowledged) {
  losses_.Note(0, 5, /*in_open_step=*/true);
  losses_.Note(1, 5, /*in_open_step=*/true);
  losses_.NoteNotified(0);
  losses_.NoteNotified(1);
  losses_.NoteAcknowledged(1);
  ReplaceEngine();
  EXPECT_EQ(losses_.state(0), LossState::kNotNotified);
  EXPECT_EQ(losses_.state(1), LossState::kAcknowledged);
}

// The engine before died as it noted the loss, so the rank was awaited still.
TEST_F(RankLossesTest, ALossThatIsNotedAgainBeginsAnew) {
  losses_.Note(1, 5, /*in_open_step=*/true);
  losses_.Note(1, 6, /*in_open_step=*/true);
  EXPECT_EQ(losses_.state(1), LossState::kNotNotified);
  EXPECT_EQ(job_.rank_mark(1).lost_at_step, 6u);
  losses_.NoteNotified(1);
  losses_.Note(1, 6, /*in_open_step=*/true);
  EXPECT_EQ(losses_.state(1), LossState::kNotNotified);
}

TEST_F(RankLossesTest, OtherTransitionsEndTheProcess) {
  EXPECT_DEATH(losses_.NoteNotified(1),
               "the loss of rank 1 cannot go from none to notified");
  losses_.Note(1, 5, /*in_open_step=*/false);
  EXPECT_DEATH(losses_.NoteNotified(1), "from acknowledged to notified");
  EXPECT_DEATH(losses_.NoteAcknowledged(1),
               "from acknowledged to acknowledged");
}

}  // namespace
}  // namespace optstate::session
