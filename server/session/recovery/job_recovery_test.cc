#include "server/session/recovery/job_recovery.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::SizeIs;

// Two ranks, in whose first step an engine dies.
class JobRecoveryTest : public UpperRoomFixture {
 protected:
  explicit JobRecoveryTest(const RegisterSpec& spec = TwoRankSpec())
      : UpperRoomFixture(spec) {}

  // Attaches a rank that has its gradients still, as RankAttachments does.
  void BringBack(uint32_t rank) {
    AttachSpec spec = AttachSpecOf(rank);
    spec.gradients_present = true;
    spec.gradient_bytes_present = spec.gradient_area_bytes;
    ranks_.Attach(spec);
    gradients_.AdoptGradients(spec);
  }
  void FinishStepIfPossible() {
    JobCall lock(&job_.lock);
    recovery_.FinishStepIfPossible();
  }
  absl::Status Admit(const AttachSpec& spec) {
    JobCall lock(&job_.lock);
    return recovery_.AdmitToRecovery(spec);
  }
  storage::ControlFile& control() { return *job_.tier->control(); }
  void ExpectFinished() {
    EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
    EXPECT_EQ(job_.record().committed_step, 1u);
    EXPECT_EQ(control().step_in_progress, 0u);
    EXPECT_EQ(control().steps_recovered, 1u);
    EXPECT_THAT(FirstElements(), Each(Lt(0)));
    EXPECT_THAT(job_.store->step_counts(), ElementsAre(1, 1));
  }
  void ExpectLost(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(status.message(), AllOf(HasSubstr("died inside step 1"),
                                        HasSubstr("Last good step: 0"),
                                        HasSubstr("optctl delete job test")));
  }
};

TEST_F(JobRecoveryTest, WithoutAStepNothingIsKept) {
  ForgetSessions();
  ASSERT_TRUE(Adopt().ok());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
  EXPECT_THAT(keeper_.kept(), IsEmpty());
}

// The engine died between the record and the clearing of its mark.
TEST_F(JobRecoveryTest, ARecordedStepIsOver) {
  storage::StepRecord record = job_.record();
  record.committed_step = 1;
  storage::PublishRecord(record, job_.tier->control());
  control().step_in_progress = 1;
  ForgetSessions();
  ASSERT_TRUE(Adopt().ok());
  EXPECT_EQ(control().step_in_progress, 0u);
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(control().steps_recovered, 0u);
}

// The job had failed, and the engine died as a load of all of it began.
TEST_F(JobRecoveryTest, AStepThatALoadGivesUpIsNotFinished) {
  DieInStep(/*updates=*/1);
  storage::StepRecord record = job_.record();
  record.load_required_from = record.load_touched_from = 0;
  storage::PublishRecord(record, job_.tier->control());
  ASSERT_TRUE(Adopt().ok());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_LOADING);
  EXPECT_EQ(control().step_in_progress, 0u);
  EXPECT_EQ(control().steps_recovered, 0u);
  EXPECT_EQ(job_.record().committed_step, 0u);
  for (uint64_t run = 0; run < job_.layout().run_count(); ++run) {
    EXPECT_EQ(job_.tier->recovery().run_stamps[run], 0u) << run;
  }
}

TEST_F(JobRecoveryTest, WaitsForAllGradientsThatTheStepNeeds) {
  DieInStep(/*updates=*/0);
  ASSERT_TRUE(Adopt().ok());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_RECOVERING);
  EXPECT_THAT(keeper_.kept(), SizeIs(2));
  BringBack(1);
  FinishStepIfPossible();
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_RECOVERING);
  BringBack(0);
  FinishStepIfPossible();
  ExpectFinished();
  EXPECT_THAT(keeper_.kept(), SizeIs(2)) << "both are attached";
  EXPECT_EQ(ranks_.gradient_area(0), AttachSpecOf(0).gradient_area);
}

TEST_F(JobRecoveryTest, AnswersTheCommitsThatCameMeanwhile) {
  DieInStep(0);
  ASSERT_TRUE(Adopt().ok());
  BringBack(0);
  NoteCommit(0, 10);
  FinishStepIfPossible();
  EXPECT_EQ(listeners_[0]->answer_count(), 0u);
  BringBack(1);
  FinishStepIfPossible();
  EXPECT_TRUE(AnswerTo(0, 10).ok());
  EXPECT_EQ(listeners_[0]->Find(10)->outcome.step, 1u);
  EXPECT_FALSE(step_.open_step.any());
}

TEST_F(JobRecoveryTest, GradientsOfALostRankMayComeWithTheNextEngine) {
  DieInStep(0);
  ranks_.Leave(1);
  const absl::Status lost = Adopt();
  ExpectLost(lost);
  EXPECT_THAT(lost.message(), HasSubstr("the gradients of rank 1"));
  EXPECT_FALSE(job_.recovery.has_value());
  EXPECT_EQ(control().step_in_progress, 1u);
  EXPECT_EQ(control().step_given_up, 0u);
  EXPECT_THAT(keeper_.kept(), SizeIs(2));
}

TEST_F(JobRecoveryTest, AStepThatWasGivenUpStaysSo) {
  DieInStep(0);
  ASSERT_TRUE(Adopt().ok());
  BringBack(0);
  NoteCommit(0, 10);
  recovery_.FailRecovery(1);
  ExpectLost(job_.failure);
  EXPECT_EQ(AnswerTo(0, 10), job_.failure);
  EXPECT_EQ(control().step_given_up, 1u);
  EXPECT_THAT(keeper_.kept(), ElementsAre(::testing::Key(0)));
  job_.failure = absl::OkStatus();
  ForgetSessions();
  const absl::Status again = Adopt();
  ExpectLost(again);
  EXPECT_THAT(again.message(), HasSubstr("the gradients of rank 1"));
  EXPECT_FALSE(job_.recovery.has_value());
  EXPECT_THAT(keeper_.kept(), IsEmpty());
}

TEST_F(JobRecoveryTest, AdmitsWhoeverBringsWhatIsNeeded) {
  DieInStep(0);
  ASSERT_TRUE(Adopt().ok());
  AttachSpec spec = AttachSpecOf(0);
  spec.gradient_bytes_present = 11;
  const absl::Status short_of = Admit(spec);
  EXPECT_EQ(short_of.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(short_of.message(), HasSubstr("12 bytes of step 1"));
  spec.gradient_bytes_present = 12;
  EXPECT_TRUE(Admit(spec).ok());
  BringBack(0);
  spec.gradient_bytes_present = 0;
  EXPECT_TRUE(Admit(spec).ok()) << "they are there";
  // Another process takes nothing from the step by coming.
  spec.client_instance = 99;
  EXPECT_EQ(Admit(spec).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_RECOVERING);
}

TEST_F(JobRecoveryTest, AnotherProcessInTheRanksPlaceShowsThatTheyAreLost) {
  DieInStep(0);
  ASSERT_TRUE(Adopt().ok());
  AttachSpec spec = AttachSpecOf(1);
  spec.client_instance = 99;
  ExpectLost(Admit(spec));
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_FAILED);
  EXPECT_EQ(control().given_up_for_rank, 1u);
}

TEST_F(JobRecoveryTest, FilesThatAreNotOfOneStepAreNoted) {
  ForgetSessions();
  job_.tier->recovery().run_stamps[0] = 2;
  const absl::Status mixed = Adopt();
  EXPECT_EQ(mixed.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(mixed.message(), HasSubstr("its files are not of one step"));
}

TEST_F(JobRecoveryTest, ADecisionThatCannotBeReadIsLost) {
  DieInStep(0);
  job_.tier->recovery().step_intent[8] ^= std::byte{1};
  ExpectLost(Adopt());
  EXPECT_FALSE(job_.recovery.has_value());
}

// The sums are in the job's files: no rank is needed.
class AccumulatingRecoveryTest : public JobRecoveryTest {
 protected:
  static RegisterSpec Accumulating() {
    RegisterSpec spec = TwoRankSpec();
    spec.accumulate = true;
    return spec;
  }
  AccumulatingRecoveryTest() : JobRecoveryTest(Accumulating()) {}
};

TEST_F(AccumulatingRecoveryTest, FinishesAtOnce) {
  DieInStep(1);
  ASSERT_TRUE(Adopt().ok());
  ExpectFinished();
  EXPECT_THAT(keeper_.kept(), IsEmpty());
}

// The job says so at once, and not only to the rank that comes first.
TEST_F(AccumulatingRecoveryTest, AStoreThatRefusesFailsTheJob) {
  DieInStep(1);
  executor_.FailAfter(0, absl::ResourceExhaustedError("no device"));
  const absl::Status failed = Adopt();
  EXPECT_EQ(failed.code(), absl::StatusCode::kResourceExhausted) << failed;
  EXPECT_THAT(failed.message(), HasSubstr("cannot finish step 1"));
  EXPECT_EQ(job_.record().committed_step, 0u);
  EXPECT_EQ(control().step_in_progress, 1u);
  // The next engine looks again.
  job_.failure = absl::OkStatus();
  job_.recovery.reset();
  ASSERT_TRUE(Adopt().ok());
  ExpectFinished();
}

}  // namespace
}  // namespace optstate::session
