#include "server/session/steps/step_coordinator.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Lt;

class StepCoordinatorTest : public UpperRoomFixture {
 protected:
  explicit StepCoordinatorTest(const RegisterSpec& spec = TwoRankSpec())
      : UpperRoomFixture(spec),
        agreement_({.job = &job_,
                    .ranks = &ranks_,
                    .step = &step_,
                    .sums = &sums_,
                    .stager = &stager_,
                    .load = &load_,
                    .rounds = &rounds_}),
        coordinator_({.job = &job_,
                      .ranks = &ranks_,
                      .step = &step_,
                      .marks = &marks_,
                      .sums = &sums_,
                      .stager = &stager_,
                      .decider = &decider_,
                      .speculator = &speculator_,
                      .committer = &committer_,
                      .losses = &losses_,
                      .agreement = &agreement_,
                      .recovery = &recovery_,
                      .preparer = &preparer_,
                      .load = &load_,
                      .rounds = &rounds_,
                      .gate = &gate_}) {}

  absl::Status PushStep(uint32_t rank, uint64_t step) {
    JobCall lock(&job_.lock);
    return coordinator_.Push(rank, step, /*micro_step=*/0, 0,
                             job_.parameter_count());
  }
  void Commit(uint32_t rank, uint64_t request_id, const CommitSpec& spec) {
    JobCall lock(&job_.lock);
    coordinator_.Commit(rank, request_id, spec);
  }
  void EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                    uint32_t micro_step) {
    JobCall lock(&job_.lock);
    coordinator_.EndMicroStep(rank, request_id, step, micro_step);
  }
  absl::Status Abort(uint32_t rank, uint64_t step) {
    JobCall lock(&job_.lock);
    return coordinator_.Abort(rank, step);
  }
  bool WorkAhead(uint32_t rank) {
    JobCall lock(&job_.lock);
    return coordinator_.WorkAhead(rank);
  }
  uint64_t committed_step() const { return job_.record().committed_step; }

  Agreement agreement_;
  StepCoordinator coordinator_;
};

TEST_F(StepCoordinatorTest, TheLastCommitTakesTheStep) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(PushStep(rank, 1).ok());
  }
  Commit(0, 10, CommitOf(1));
  EXPECT_EQ(AnswerTo(0, 10).code(), absl::StatusCode::kUnknown);
  EXPECT_EQ(committed_step(), 0u);
  Commit(1, 11, CommitOf(1));
  EXPECT_TRUE(AnswerTo(0, 10).ok());
  EXPECT_TRUE(AnswerTo(1, 11).ok());
  EXPECT_EQ(listeners_[0]->Find(10)->outcome.step, 1u);
  EXPECT_EQ(committed_step(), 1u);
  EXPECT_THAT(FirstElements(), Each(Lt(0)));
  EXPECT_EQ(step_.progress.phase(), StepPhase::kNone);
  EXPECT_FALSE(step_.open_step.any());
}

TEST_F(StepCoordinatorTest, ARepeatedCommitGetsTheRecordedOutcome) {
  for (uint32_t rank = 0; rank < 2; ++rank) Commit(rank, 10, CommitOf(1));
  ASSERT_EQ(committed_step(), 1u);
  Commit(0, 20, CommitOf(1));
  EXPECT_TRUE(AnswerTo(0, 20).ok());
  EXPECT_EQ(listeners_[0]->Find(20)->outcome.step, 1u);
  CommitSpec other = CommitOf(1);
  other.max_norm = 5;
  Commit(0, 21, other);
  EXPECT_TRUE(absl::IsFailedPrecondition(AnswerTo(0, 21)));
  EXPECT_EQ(committed_step(), 1u);
}

TEST_F(StepCoordinatorTest, OnlyTheNextStepIsTaken) {
  for (const uint64_t step : {0, 2}) {
    const absl::Status refused = PushStep(0, step);
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(refused.message(), HasSubstr("the next is 1"));
    Commit(0, 10 + step, CommitOf(step));
    EXPECT_TRUE(absl::IsFailedPrecondition(AnswerTo(0, 10 + step)));
    EXPECT_TRUE(absl::IsFailedPrecondition(Abort(0, step)));
  }
  EXPECT_FALSE(step_.open_step.any());
}

TEST_F(StepCoordinatorTest, ARankThatHasCommittedWaits) {
  ASSERT_TRUE(PushStep(0, 1).ok());
  Commit(0, 10, CommitOf(1));
  EXPECT_THAT(PushStep(0, 1).message(), HasSubstr("cannot push to it"));
  Commit(0, 11, CommitOf(1));
  EXPECT_THAT(AnswerTo(0, 11).message(), HasSubstr("(request 10)"));
  EndMicroStep(0, 12, 1, 0);
  EXPECT_THAT(AnswerTo(0, 12).message(), HasSubstr("cannot end a micro-step"));
  EXPECT_EQ(AnswerTo(0, 10).code(), absl::StatusCode::kUnknown);
}

TEST_F(StepCoordinatorTest, UnlikeCommitsDropTheStep) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(PushStep(rank, 1).ok());
  }
  Commit(0, 10, CommitOf(1));
  CommitSpec other = CommitOf(1);
  other.max_norm = 5;
  Commit(1, 11, other);
  EXPECT_TRUE(absl::IsFailedPrecondition(AnswerTo(0, 10))) << AnswerTo(0, 10);
  EXPECT_EQ(AnswerTo(0, 10), AnswerTo(1, 11));
  EXPECT_EQ(committed_step(), 0u);
  EXPECT_FALSE(step_.open_step.any());
  EXPECT_TRUE(PushStep(0, 1).ok()) << "the step can be repeated";
}

TEST_F(StepCoordinatorTest, AnAbortAnswersTheRanksOwnCommit) {
  ASSERT_TRUE(PushStep(0, 1).ok());
  Commit(0, 10, CommitOf(1));
  ASSERT_TRUE(Abort(0, 1).ok());
  EXPECT_TRUE(absl::IsAborted(AnswerTo(0, 10)));
  EXPECT_FALSE(step_.open_step.any());
  EXPECT_TRUE(Abort(0, 1).ok()) << "there is nothing left";
}

TEST_F(StepCoordinatorTest, AnAbortEndsTheRanksLoad) {
  load_.round.Begin(0);
  load_.round.Finish(0, 10, {});
  ASSERT_TRUE(Abort(0, 1).ok());
  EXPECT_TRUE(absl::IsAborted(AnswerTo(0, 10)));
  EXPECT_FALSE(load_.round.active());
}

TEST_F(StepCoordinatorTest, ALoadComesBeforeTheStep) {
  load_.round.Begin(0);
  EXPECT_THAT(PushStep(0, 1).message(), HasSubstr("has begun a load"));
  load_.round.Clear();
  storage::StepRecord record = job_.record();
  record.load_required_from = 1;
  storage::PublishRecord(record, job_.tier->control());
  EXPECT_THAT(PushStep(0, 1).message(), HasSubstr("is loading"));
}

TEST_F(StepCoordinatorTest, ADrainLetsAnOpenStepEnd) {
  ASSERT_TRUE(PushStep(0, 1).ok());
  gate_.BeginDrain();
  EXPECT_TRUE(PushStep(1, 1).ok());
  Commit(0, 10, CommitOf(1));
  Commit(1, 11, CommitOf(1));
  EXPECT_EQ(committed_step(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(PushStep(0, 2)));
}

TEST_F(StepCoordinatorTest, AFailedJobTakesNoStep) {
  job_.failure = absl::DataLossError("why");
  EXPECT_EQ(PushStep(0, 1), job_.failure);
  EXPECT_EQ(Abort(0, 1), job_.failure);
  Commit(0, 10, CommitOf(1));
  EXPECT_EQ(AnswerTo(0, 10), job_.failure);
  EXPECT_FALSE(WorkAhead(0));
}

TEST_F(StepCoordinatorTest, ARankThatIsGoneIsNotAnswered) {
  ranks_.Leave(0);
  Commit(0, 10, CommitOf(1));
  EndMicroStep(0, 11, 1, 0);
  EXPECT_EQ(listeners_[0]->answer_count(), 0u);
  EXPECT_FALSE(PushStep(0, 1).ok());
  EXPECT_FALSE(WorkAhead(0));
}

// Ranks whose gradients are summed as the micro-steps of all have ended.
class SummingCoordinatorTest : public StepCoordinatorTest {
 protected:
  SummingCoordinatorTest()
      : StepCoordinatorTest(ReplicatedSpec(2, /*accumulate=*/true)) {}
};

TEST_F(SummingCoordinatorTest, AMicroStepEndsForAllAtOnce) {
  ASSERT_TRUE(PushStep(0, 1).ok());
  EndMicroStep(0, 10, 1, 0);
  EXPECT_EQ(AnswerTo(0, 10).code(), absl::StatusCode::kUnknown);
  EndMicroStep(0, 11, 1, 0);
  EXPECT_THAT(AnswerTo(0, 11).message(), HasSubstr("(request 10)"));
  ASSERT_TRUE(PushStep(1, 1).ok());
  EndMicroStep(1, 12, 1, 0);
  EXPECT_TRUE(AnswerTo(0, 10).ok()) << AnswerTo(0, 10);
  EXPECT_TRUE(AnswerTo(1, 12).ok()) << AnswerTo(1, 12);
  EXPECT_EQ(committed_step(), 0u);
}

TEST_F(StepCoordinatorTest, ARankWithGradientsOfItsOwnWaitsForNoOther) {
  EndMicroStep(0, 10, 1, 0);
  EXPECT_TRUE(AnswerTo(0, 10).ok());
}

}  // namespace
}  // namespace optstate::session
