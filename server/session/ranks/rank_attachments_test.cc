#include "server/session/ranks/rank_attachments.h"

#include <unistd.h>

#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/os/process_stat.h"
#include "server/session/recovery/staging_file.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::SizeIs;

// Two ranks that are attached.
class RankAttachmentsTest : public UpperRoomFixture {
 protected:
  explicit RankAttachmentsTest(const RegisterSpec& spec = TwoRankSpec())
      : UpperRoomFixture(spec),
        attachments_({.job = &job_,
                      .ranks = &ranks_,
                      .step = &step_,
                      .stager = &stager_,
                      .losses = &losses_,
                      .gradients = &gradients_,
                      .recovery = &recovery_,
                      .rounds = &rounds_,
                      .gate = &gate_}) {}

  absl::StatusOr<AttachResult> Attach(const AttachSpec& spec) {
    JobCall lock(&job_.lock);
    return attachments_.Attach(spec);
  }
  // Attaches a rank that still has the gradients of the step in which the
  // engine died.
  absl::Status BringBack(uint32_t rank, RankProcess process = {}) {
    AttachSpec spec = AttachSpecOf(rank);
    spec.gradients_present = true;
    spec.gradient_bytes_present = spec.gradient_area_bytes;
    spec.process = process;
    return Attach(spec).status();
  }
  void Detach(uint32_t rank, bool for_good = false) {
    JobCall lock(&job_.lock);
    attachments_.DetachLocked(rank, for_good);
  }
  // Makes the file in which a transport stages the rank's gradients.
  std::string MakeStaging(uint32_t rank) {
    const std::string path = job_.StagingPath(rank, kInstance + rank);
    bool present = false;
    EXPECT_TRUE(MakeStagingFile(path, 12, &present).ok());
    return path;
  }
  static RankProcess ThisProcess() {
    return {.pid = ::getpid(),
            .start_ticks = os::ReadProcessStat(::getpid())->start_ticks};
  }
  const storage::RankMark& mark(uint32_t rank) { return job_.rank_mark(rank); }
  LossState loss(uint32_t rank) { return ranks_.losses().state(rank); }
  bool IsAwaited(uint32_t rank) {
    return ranks_.state(rank) == RankState::kAwaited;
  }

  RankAttachments attachments_;
};

TEST_F(RankAttachmentsTest, ADetachBetweenStepsIsNoLoss) {
  const std::string staging = MakeStaging(1);
  Detach(1);
  EXPECT_FALSE(ranks_.CheckAttached(1).ok());
  EXPECT_EQ(mark(1).attached, 0u);
  EXPECT_EQ(loss(1), LossState::kAcknowledged) << "none is told";
  EXPECT_EQ(ranks_.gradient_area(1), nullptr);
  EXPECT_FALSE(std::filesystem::exists(staging));
  EXPECT_THAT(keeper_.kept(), ElementsAre(Key(0)));
  Detach(1);  // again
  Detach(7);  // no rank
}

TEST_F(RankAttachmentsTest, ADetachInAStepIsTold) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  NoteCommit(0, 10);
  ASSERT_TRUE(Push(1, 0, 2).ok());
  Detach(1);
  EXPECT_EQ(loss(1), LossState::kNotNotified);
  EXPECT_EQ(mark(1).lost_at_step, 1u);
  EXPECT_FALSE(step_.open_step.opened_by(1));
  EXPECT_TRUE(step_.open_step.opened_by(0));
  EXPECT_THAT(listeners_[0]->notices(),
              ElementsAre(HasSubstr("rank 1 lost at step 1")));
}

TEST_F(RankAttachmentsTest, NobodyWaitsForTheLostWhenAllAreGone) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  Detach(1);
  EXPECT_NE(loss(1), LossState::kNone);
  Detach(0);
  EXPECT_EQ(loss(0), LossState::kNone);
  EXPECT_EQ(loss(1), LossState::kNone);
}

TEST_F(RankAttachmentsTest, ADetachLeavesTheRanksLoad) {
  load_.round.Begin(0);
  load_.round.Finish(0, 10, {});
  load_.round.Begin(1);
  Detach(1);
  EXPECT_EQ(AnswerTo(0, 10).code(), absl::StatusCode::kAborted);
}

TEST_F(RankAttachmentsTest, AnAttachIsToldWhereTheJobIs) {
  Detach(1);
  storage::StepRecord record = job_.record();
  record.committed_step = 5;
  record.flags = storage::kStepRecordHasOutcome | storage::kStepRecordApplied;
  record.loads_finished = 3;
  storage::PublishRecord(record, job_.tier->control());
  const auto attached = Attach(AttachSpecOf(1));
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->committed_step, 5u);
  EXPECT_EQ(attached->phase, v1::JOB_PHASE_READY);
  ASSERT_TRUE(attached->has_last_outcome);
  EXPECT_EQ(attached->last_outcome.step, 5u);
  EXPECT_EQ(attached->loads_finished, 3u);
  EXPECT_EQ(attached->load_required_from, 2u);
  EXPECT_EQ(ranks_.state(1), RankState::kAttached);
  EXPECT_EQ(loss(1), LossState::kNone);
  EXPECT_EQ(ranks_.gradient_area(1), AttachSpecOf(1).gradient_area);
  EXPECT_EQ(Attach(AttachSpecOf(1)).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(RankAttachmentsTest, ADrainingJobTakesOnlyThoseBackThatItKnows) {
  Detach(0);
  Detach(1);
  gate_.BeginDrain();
  AttachSpec stranger = AttachSpecOf(0);
  stranger.client_instance = 99;
  EXPECT_EQ(Attach(stranger).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Attach(AttachSpecOf(0)).ok());
}

TEST_F(RankAttachmentsTest, GradientsOfASegmentAreKept) {
  Detach(1);
  AttachSpec spec = AttachSpecOf(1);
  ASSERT_TRUE(Attach(spec).ok());
  EXPECT_THAT(keeper_.kept(), ElementsAre(Key(0))) << "it has none";
  Detach(1);
  spec.gradient_segment = STDIN_FILENO;
  ASSERT_TRUE(Attach(spec).ok());
  EXPECT_THAT(keeper_.kept(), SizeIs(2));
}

TEST_F(RankAttachmentsTest, ARankThatIsGivenUpWasAwaited) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  ranks_.Await(1);  // of a former engine
  attachments_.GiveUpAbsent(1, kInstance + 9);
  attachments_.GiveUpAbsent(0, kInstance);
  attachments_.GiveUpAbsent(7, kInstance);
  EXPECT_EQ(ranks_.AwaitedCount(), 1u);
  EXPECT_EQ(ranks_.AttachedCount(), 1u);
  attachments_.GiveUpAbsent(1, kInstance + 1);
  EXPECT_EQ(ranks_.state(1), RankState::kAbsent);
  EXPECT_EQ(loss(1), LossState::kNotNotified);
}

TEST_F(RankAttachmentsTest, OfAFailedJobAllIsKept) {
  const std::string staging = MakeStaging(1);
  ranks_.Await(1);
  job_.failure = absl::DataLossError("why");
  attachments_.GiveUpAbsent(1, kInstance + 1);
  EXPECT_EQ(ranks_.state(1), RankState::kAbsent);
  EXPECT_EQ(loss(1), LossState::kNone);
  EXPECT_TRUE(std::filesystem::exists(staging));
}

// A step in which an engine died.
class RecoveringAttachmentsTest : public RankAttachmentsTest {
 protected:
  RecoveringAttachmentsTest() {
    DieInStep(/*updates=*/0);
    EXPECT_TRUE(Adopt().ok());
    EXPECT_EQ(job_.phase(), v1::JOB_PHASE_RECOVERING);
  }
};

TEST_F(RecoveringAttachmentsTest, TheLastRankWithGradientsFinishesIt) {
  ASSERT_TRUE(BringBack(0).ok());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_RECOVERING);
  ASSERT_TRUE(BringBack(1).ok());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job_.record().committed_step, 1u);
  EXPECT_EQ(ranks_.session(0).recovering_step, 1u);
  EXPECT_THAT(keeper_.kept(), SizeIs(2));
}

TEST_F(RecoveringAttachmentsTest, ARankThatIsNeededIsAwaitedAgain) {
  ASSERT_TRUE(BringBack(1).ok());  // nobody can watch its process
  Detach(1);
  EXPECT_TRUE(IsAwaited(1));
  EXPECT_EQ(ranks_.gradient_area(1), nullptr);
  EXPECT_THAT(keeper_.kept(), SizeIs(2));
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_RECOVERING);
}

TEST_F(RecoveringAttachmentsTest, WhileItsProcessRuns) {
  ASSERT_TRUE(BringBack(1, ThisProcess()).ok());
  Detach(1);
  EXPECT_TRUE(IsAwaited(1));
  RankProcess ended = ThisProcess();
  ended.start_ticks += 1;  // the pid is another process's by now
  ASSERT_TRUE(BringBack(1, ended).ok());
  Detach(1);
  EXPECT_FALSE(IsAwaited(1));
  EXPECT_EQ(job_.failure.code(), absl::StatusCode::kDataLoss);
}

TEST_F(RecoveringAttachmentsTest, ARankThatLeavesForGoodTakesThemAlong) {
  ASSERT_TRUE(BringBack(1).ok());
  Detach(1, /*for_good=*/true);
  EXPECT_EQ(job_.failure.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(job_.failure.message(), HasSubstr("the gradients of rank 1"));
}

TEST_F(RecoveringAttachmentsTest, SoDoesOneThatHasSaidFarewell) {
  ASSERT_TRUE(BringBack(1).ok());
  attachments_.NoteFarewell(1, kInstance + 9);  // another session
  attachments_.NoteFarewell(7, kInstance);      // no rank
  Detach(1);
  EXPECT_TRUE(IsAwaited(1));
  ASSERT_TRUE(BringBack(1).ok());
  attachments_.NoteFarewell(1, kInstance + 1);
  EXPECT_TRUE(job_.failure.ok()) << "its connection is still there";
  Detach(1);
  EXPECT_EQ(job_.failure.code(), absl::StatusCode::kDataLoss);
}

TEST_F(RecoveringAttachmentsTest, AFarewellFromAnotherConnectionIsEnough) {
  attachments_.NoteFarewell(1, kInstance + 1);
  EXPECT_FALSE(IsAwaited(1));
  EXPECT_EQ(job_.failure.code(), absl::StatusCode::kDataLoss);
}

class AccumulatingAttachmentsTest : public RankAttachmentsTest {
 protected:
  static RegisterSpec Accumulating() {
    RegisterSpec spec = TwoRankSpec();
    spec.accumulate = true;
    return spec;
  }
  AccumulatingAttachmentsTest() : RankAttachmentsTest(Accumulating()) {
    EXPECT_TRUE(Push(1, 0, 2).ok());
    ranks_.Await(1);  // of a former engine
  }
};

TEST_F(AccumulatingAttachmentsTest, ARankThatReturnsFindsWhatItHadStaged) {
  const auto attached = Attach(AttachSpecOf(1));
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_THAT(attached->staged, SizeIs(1));
  EXPECT_EQ(mark(1).step, 1u);
}

TEST_F(AccumulatingAttachmentsTest, AnotherInItsPlaceFindsNothing) {
  const std::string staging = MakeStaging(1);
  AttachSpec spec = AttachSpecOf(1);
  spec.client_instance = 99;
  const auto attached = Attach(spec);
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_THAT(attached->staged, SizeIs(0));
  EXPECT_EQ(mark(1).step, 0u);
  EXPECT_EQ(mark(1).client_instance, 99u);
  EXPECT_FALSE(std::filesystem::exists(staging));
}

}  // namespace
}  // namespace optstate::session
