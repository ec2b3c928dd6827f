#include "server/session/steps/micro_step_summer.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/step_rooms.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

// Three ranks whose gradients of "a" and "b" are 1, 2 and 3.
class MicroStepSummerTest : public StepRoomFixture {
 protected:
  MicroStepSummerTest()
      : StepRoomFixture(ReplicatedSpec(3, /*accumulate=*/true)) {}

  absl::Status PushTogether(uint32_t rank, uint32_t first, uint32_t end,
                            uint32_t micro_step = 0) {
    return sums_.PushTogether(rank, 1, micro_step, first, end);
  }
  void PushAll(uint32_t micro_step = 0) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(PushTogether(rank, 0, 2, micro_step).ok());
    }
  }
  // Has the rank say that it has pushed all of a micro-step.
  void End(uint32_t rank, uint32_t micro_step, uint64_t request_id) {
    marks_.BeginStaging(rank, 1, micro_step);
    NoteEnding(rank, request_id);
    sums_.NotePast(rank, int64_t{micro_step} + 1);
    sums_.SumCompletedMicroSteps(0, 0);
  }
  float SumOf(uint32_t parameter) {
    return *reinterpret_cast<const float*>(job_.store->sums(parameter, 0));
  }
};

TEST_F(MicroStepSummerTest, SumsWhatAllRanksHavePushed) {
  ASSERT_TRUE(PushTogether(0, 0, 2).ok());
  ASSERT_TRUE(PushTogether(1, 0, 1).ok());
  ASSERT_TRUE(PushTogether(2, 0, 2).ok());
  EXPECT_EQ(step_.micro_steps.summed(0), 0);
  EXPECT_EQ(step_.micro_steps.summed(1), MicroSteps::kNone);
  EXPECT_EQ(SumOf(0), 6);
  // Rank 1 goes on to the next micro-step, without a gradient of "b".
  ASSERT_TRUE(PushTogether(1, 0, 1, 1).ok());
  EXPECT_EQ(step_.micro_steps.summed(1), 0);
  EXPECT_EQ(SumOf(1), 4);
}

TEST_F(MicroStepSummerTest, AnEndIsAnsweredWhenTheRanksGradientsAreSummed) {
  ASSERT_TRUE(PushTogether(0, 0, 1).ok());
  End(0, 0, 10);
  EXPECT_TRUE(sums_.IsWaiting(0));
  EXPECT_EQ(job_.rank_mark(0).ended, 0u);
  End(1, 0, 11);  // it waits for nothing
  EXPECT_TRUE(AnswerTo(1, 11).ok());
  End(2, 0, 12);
  EXPECT_TRUE(AnswerTo(0, 10).ok());
  EXPECT_EQ(SumOf(0), 1);
  EXPECT_FALSE(sums_.IsWaiting(0));
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job_.rank_mark(rank).ended, 1u);
    EXPECT_EQ(job_.rank_mark(rank).ended_epoch, job_.rank_mark(0).epoch);
  }
}

TEST_F(MicroStepSummerTest, AnErrorMarksNoEnd) {
  ASSERT_TRUE(PushTogether(0, 0, 1).ok());
  End(0, 0, 10);
  sums_.AnswerEnding(0, absl::AbortedError("why"));
  EXPECT_EQ(AnswerTo(0, 10), absl::AbortedError("why"));
  EXPECT_EQ(job_.rank_mark(0).ended, 0u);
  sums_.AnswerEnding(0, absl::OkStatus());  // there is none any more
}

// A rank's pushes that are in no sum are dropped alone: the others go on.
TEST_F(MicroStepSummerTest, ADropWithoutSumsIsTheRanksOwn) {
  ASSERT_TRUE(PushTogether(0, 0, 2).ok());
  ASSERT_TRUE(PushTogether(1, 0, 2).ok());
  const uint32_t epoch = job_.rank_mark(0).epoch;
  sums_.DropSums(1);
  EXPECT_TRUE(sums_.CheckSums(0).ok());
  EXPECT_EQ(step_.micro_steps.waiting(0), 2u);
  EXPECT_EQ(step_.micro_steps.waiting(1), 0u);
  EXPECT_NE(job_.rank_mark(0).epoch, epoch);
  EXPECT_EQ(job_.rank_mark(0).step, 1u);
}

TEST_F(MicroStepSummerTest, ADropVoidsTheSumsOfAll) {
  ASSERT_NO_FATAL_FAILURE(PushAll());
  NoteCommit(0, 10);
  ASSERT_TRUE(PushTogether(2, 0, 1, 1).ok());
  NoteEnding(2, 12);
  sums_.DropSums(1);
  EXPECT_FALSE(step_.micro_steps.any_summed());
  EXPECT_EQ(job_.rank_mark(0).step, 0u) << "nor for the next engine";
  for (const auto& [rank, request] : {std::pair(0, 10), std::pair(2, 12)}) {
    const absl::Status told = AnswerTo(rank, request);
    EXPECT_EQ(told.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(told.message(), HasSubstr("rank 1 was lost or has aborted"));
    EXPECT_EQ(sums_.CheckSums(rank), told) << "until it aborts too";
    EXPECT_FALSE(step_.open_step.opened_by(rank));
    sums_.DropSums(rank);
    EXPECT_TRUE(sums_.CheckSums(rank).ok());
  }
  EXPECT_TRUE(sums_.CheckSums(1).ok());
}

TEST_F(MicroStepSummerTest, WhoHadNoPartInThemHearsNothing) {
  ASSERT_TRUE(PushTogether(0, 0, 1).ok());
  sums_.NotePast(1, 1);
  ranks_.Leave(2);
  sums_.NotePast(2, 1);  // and is away
  ASSERT_TRUE(step_.micro_steps.any_summed());
  sums_.DropSums(0);
  EXPECT_FALSE(sums_.CheckSums(1).ok());
  EXPECT_TRUE(sums_.CheckSums(2).ok());
  sums_.DropSums(1);
  ASSERT_TRUE(PushTogether(0, 0, 1).ok());
  sums_.DropSums(0);
  EXPECT_TRUE(sums_.CheckSums(1).ok()) << "it has begun nothing since";
}

// A rank that learns of a loss by its abort is not aborted for it again.
TEST_F(MicroStepSummerTest, AnAbortBecauseOfALossAcknowledgesIt) {
  for (const bool is_loss : {false, true}) {
    ASSERT_NO_FATAL_FAILURE(PushAll());
    if (is_loss) ranks_.losses().Note(1, 1, /*in_open_step=*/true);
    sums_.DropSums(1);
    if (!is_loss) ranks_.losses().Note(1, 1, /*in_open_step=*/true);
    sums_.NoteDropAcknowledged(0);
    EXPECT_EQ(ranks_.losses().IsUnacknowledged(1), !is_loss);
    ranks_.losses().Forget(1);
    sums_.DropSums(0);
    sums_.DropSums(2);
  }
  sums_.NoteDropAcknowledged(0);  // of nothing
}

TEST_F(MicroStepSummerTest, TheNextEngineGoesOnWithTheSums) {
  ASSERT_NO_FATAL_FAILURE(PushAll());
  End(1, 0, 11);
  ASSERT_TRUE(PushTogether(0, 0, 1, 1).ok());  // in no sum yet
  ForgetSessions();
  sums_.RestoreSums();
  EXPECT_EQ(step_.micro_steps.summed(0), 0);
  EXPECT_EQ(step_.micro_steps.summed(1), 0);
  EXPECT_EQ(step_.micro_steps.past(1), 1);
  EXPECT_EQ(step_.micro_steps.past(0), 0);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(step_.micro_steps.waiting(rank), 0u);
    EXPECT_TRUE(step_.open_step.opened_by(rank));
  }
}

TEST_F(MicroStepSummerTest, AnEndOfTheNextEpochCounts) {
  ASSERT_NO_FATAL_FAILURE(PushAll());
  End(1, 0, 11);
  job_.rank_mark(1).ended_epoch = storage::EpochAfter(job_.rank_mark(0).epoch);
  job_.rank_mark(2).ended = 5;
  job_.rank_mark(2).ended_epoch = job_.rank_mark(0).epoch - 1;
  ForgetSessions();
  sums_.RestoreSums();
  EXPECT_EQ(step_.micro_steps.past(1), 1);
  EXPECT_EQ(step_.micro_steps.past(2), 0) << "of a former epoch";
  EXPECT_EQ(job_.rank_mark(1).ended_epoch, job_.rank_mark(0).epoch);
}

TEST_F(MicroStepSummerTest, SumsOfAStepThatIsOverAreNotRestored) {
  ASSERT_NO_FATAL_FAILURE(PushAll());
  ForgetSessions();
  storage::StepRecord record = job_.record();
  record.committed_step = 1;
  storage::PublishRecord(record, job_.tier->control());
  sums_.RestoreSums();
  EXPECT_FALSE(step_.micro_steps.any_summed());
  EXPECT_FALSE(step_.open_step.any());
}

}  // namespace
}  // namespace optstate::session
