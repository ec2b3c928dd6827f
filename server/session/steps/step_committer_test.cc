#include "server/session/steps/step_committer.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/steps/commit_content.h"
#include "server/session/testing/upper_rooms.h"
#include "storage/format/step_intent.h"

namespace optstate::session {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Notes what is in the control file at each moment of a step.
class Moments final : public scheduler::StepObserver {
 public:
  explicit Moments(const JobContext* job) : job_(*job) {}
  void OnStepMarked(uint64_t /*step*/) override { Note("marked"); }
  void OnStepRecorded(uint64_t /*step*/) override { Note("recorded"); }
  const std::vector<std::string>& seen() const { return seen_; }

 private:
  void Note(const std::string& moment) {
    seen_.push_back(moment + " at " +
                    std::to_string(job_.record().committed_step) + ", in " +
                    std::to_string(job_.tier->control()->step_in_progress));
  }

  const JobContext& job_;
  std::vector<std::string> seen_;
};

class StepCommitterTest : public UpperRoomFixture {
 protected:
  explicit StepCommitterTest(const RegisterSpec& spec = TwoRankSpec())
      : UpperRoomFixture(spec) {
    job_.options.observer = &moments_;
  }

  absl::Status CommitDecision(const StepDecision& decision) {
    JobCall lock(&job_.lock);
    return committer_.CommitDecision(decision, updated_);
  }
  StepDecision Decide() { return DecideStep(&updated_); }

  absl::Span<const uint8_t> updated_;
  Moments moments_{&job_};
};

TEST_F(StepCommitterTest, MarksAppliesAndRecords) {
  const StepDecision decision = Decide();
  ASSERT_TRUE(CommitDecision(decision).ok());
  EXPECT_THAT(moments_.seen(),
              ElementsAre("marked at 0, in 1", "recorded at 1, in 1"));
  EXPECT_EQ(job_.tier->control()->step_in_progress, 0u);
  const storage::StepRecord& record = job_.record();
  EXPECT_EQ(record.flags,
            storage::kStepRecordHasOutcome | storage::kStepRecordApplied);
  EXPECT_EQ(record.commit_digest, DigestOf(CommitOf(1)));
  EXPECT_EQ(record.gradient_norm, decision.outcome.gradient_norm);
  EXPECT_EQ(record.clip_coefficient, 1);
  EXPECT_GT(record.committed_at_ns, 0);
  EXPECT_THAT(FirstElements(), Each(::testing::Lt(0)));
  EXPECT_THAT(job_.store->step_counts(), ElementsAre(1, 1));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks_.session(rank).committed_step, 1u);
  }
  EXPECT_EQ(committer_.skipped_steps(), 0u);
}

TEST_F(StepCommitterTest, ASkippedStepIsOnlyRecorded) {
  StepDecision decision = Decide();
  decision.outcome.applied = false;
  decision.outcome.found_inf = true;
  ASSERT_TRUE(CommitDecision(decision).ok());
  EXPECT_THAT(moments_.seen(), ElementsAre("recorded at 1, in 0"));
  EXPECT_EQ(job_.record().flags,
            storage::kStepRecordHasOutcome | storage::kStepRecordFoundInf);
  EXPECT_EQ(job_.record().update_ns, 0u);
  EXPECT_THAT(FirstElements(), Each(0));
  EXPECT_THAT(job_.store->step_counts(), ElementsAre(0, 0));
  EXPECT_EQ(committer_.skipped_steps(), 1u);
}

// A failed step keeps its intent, which the next engine needs to finish it as
// it was decided.
TEST_F(StepCommitterTest, AStepThatFailsStaysMarkedAndFailsTheJob) {
  const StepDecision decision = Decide();
  executor_.FailAfter(1, absl::ResourceExhaustedError("no device"));
  const absl::Status failed = CommitDecision(decision);
  EXPECT_EQ(failed.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(failed.message(), HasSubstr("cannot finish step 1"));
  EXPECT_EQ(job_.failure, failed);
  EXPECT_EQ(job_.record().committed_step, 0u);
  EXPECT_EQ(job_.tier->control()->step_in_progress, 1u);
  EXPECT_THAT(job_.store->step_counts(), ElementsAre(0, 0));
  storage::StepIntent intent;
  ASSERT_TRUE(storage::ReadStepIntent(job_.tier->recovery().step_intent, 1, 2,
                                      2, &intent)
                  .ok());
  EXPECT_EQ(intent.header.record.committed_step, 1u);
  EXPECT_EQ(intent.header.record.committed_at_ns, 0);
  EXPECT_THAT(intent.updated, ElementsAre(1, 1));
  EXPECT_THAT(intent.pushed_by, IsEmpty());
  // Another call of ApplyStep() does the rest, once.
  const std::vector<float> before = FirstElements();
  scheduler::StepScheduler::Update update;
  update.step = 1;
  update.groups = intent.groups;
  update.updated = intent.updated;
  update.gradient_areas = ranks_.gradient_areas();
  JobCall lock(&job_.lock);
  ASSERT_TRUE(committer_.ApplyStep(update, intent.header.record).ok());
  EXPECT_EQ(job_.record().committed_step, 1u);
  EXPECT_THAT(job_.store->step_counts(), ElementsAre(1, 1));
  const std::vector<float> after = FirstElements();
  for (uint32_t p = 0; p < 2; ++p) {
    EXPECT_LT(after[p], 0);
    EXPECT_TRUE(before[p] == 0 || after[p] == before[p]);
  }
}

class ScaledCommitterTest : public StepCommitterTest {
 protected:
  static RegisterSpec Scaled() {
    RegisterSpec spec = TwoRankSpec();
    spec.loss_scaler.emplace();
    spec.loss_scaler->set_dynamic(true);
    spec.loss_scaler->set_init_scale(8);
    spec.loss_scaler->set_growth_factor(2);
    spec.loss_scaler->set_backoff_factor(0.5);
    spec.loss_scaler->set_growth_interval(2);
    spec.loss_scaler->set_hysteresis(1);
    return spec;
  }
  ScaledCommitterTest() : StepCommitterTest(Scaled()) {}
};

TEST_F(ScaledCommitterTest, TheScaleMovesOnWithTheStep) {
  StepDecision decision = Decide();
  ASSERT_TRUE(CommitDecision(decision).ok());
  EXPECT_EQ(job_.record().loss_scale, 8);
  EXPECT_EQ(job_.record().good_steps, 1u);
  step_.open_step.DropAll();
  step_.progress.End();
  decision = Decide();
  decision.outcome.step = 2;
  decision.outcome.applied = false;
  decision.outcome.found_inf = true;
  ASSERT_TRUE(CommitDecision(decision).ok());
  EXPECT_EQ(job_.record().loss_scale, 4);
  EXPECT_EQ(job_.record().good_steps, 0u);
}

}  // namespace
}  // namespace optstate::session
