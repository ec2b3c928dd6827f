#include "server/session/transfer/load_rounds.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/gradient_log.h"
#include "server/session/testing/upper_rooms.h"
#include "storage/format/control_file.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A job whose masters are 7; each test says how far it is loaded.
class LoadRoundsTest : public UpperRoomFixture {
 protected:
  LoadRoundsTest() {
    const std::vector<float> values(3, 7);
    for (uint32_t p = 0; p < 2; ++p) {
      EXPECT_TRUE(job_.Elements()
                      .Write({v1::STATE_ARRAY_MASTER, p, 0, 3},
                             reinterpret_cast<const std::byte*>(values.data()))
                      .ok());
    }
  }

  // Says which parameters have no valid state, and which were overwritten.
  void SetLoaded(uint32_t required_from, uint32_t touched_from) {
    storage::StepRecord record = job_.record();
    record.load_required_from = required_from;
    record.load_touched_from = touched_from;
    storage::PublishRecord(record, job_.tier->control());
  }
  absl::Status Start() {
    JobCall lock(&job_.lock);
    return rounds_.Start();
  }
  void Finish(uint32_t rank, uint64_t request_id) {
    load_.round.Begin(rank);
    load_.round.Finish(rank, request_id, {});
  }
  // Loads a value that is not the state's, beside it.
  void StageSomething() {
    log_.DropLog();
    const float values[] = {8, 8, 8};
    ASSERT_TRUE(load_.staged
                    .Stage(job_.Elements(), {v1::STATE_ARRAY_MASTER, 0, 0, 3},
                           reinterpret_cast<const std::byte*>(values),
                           /*is_present=*/false,
                           [this](uint64_t bytes) { return log_.Grow(bytes); })
                    .ok());
  }
};

TEST_F(LoadRoundsTest, AJobThatIsLoadedStaysAsItIs) {
  ASSERT_NO_FATAL_FAILURE(StageSomething());
  ASSERT_TRUE(Start().ok());
  EXPECT_TRUE(load_.staged.empty()) << "of a former round";
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
  EXPECT_THAT(FirstElements(), ElementsAre(7, 7));
}

TEST_F(LoadRoundsTest, WhatAnInterruptedLoadHasTouchedIsCleared) {
  SetLoaded(/*required_from=*/2, /*touched_from=*/1);
  ASSERT_TRUE(Start().ok());
  EXPECT_THAT(FirstElements(), ElementsAre(7, 0));
  EXPECT_EQ(job_.record().load_required_from, 1u);
  EXPECT_EQ(job_.record().load_touched_from, storage::kNoParameter);
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_LOADING);
}

TEST_F(LoadRoundsTest, AFailedJobBeginsAnew) {
  storage::ControlFile& control = *job_.tier->control();
  control.step_in_progress = 1;
  control.step_given_up = 1;
  job_.tier->recovery().run_stamps[0] = 1;
  job_.failure = absl::DataLossError("why");
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_LOADING);
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
  EXPECT_EQ(job_.record().load_required_from, 0u);
  EXPECT_EQ(control.step_in_progress, 0u);
  EXPECT_EQ(control.step_given_up, 0u);
  EXPECT_EQ(job_.tier->recovery().run_stamps[0], 0u);
}

RegisterSpec SpecOfResidents() {
  RegisterSpec spec = TwoRankSpec();
  spec.storage.set_offload_fraction(0);
  spec.storage.set_device_budget_bytes(uint64_t{64} << 20);
  return spec;
}

class ResidentLoadRoundsTest : public AttachedRoomTest<UpperRooms> {
 protected:
  ResidentLoadRoundsTest() : AttachedRoomTest(SpecOfResidents()) {}

  bool HasResidents() {
    return scheduler::GradientLog::HasResidents(job_.tier->gradient_log());
  }
};

// The stamps, by which records are brought up to date, are forgotten too.
TEST_F(ResidentLoadRoundsTest, AFailedJobWhoseRecordsLagBehindDevices) {
  // So many that the records here have some of them.
  for (uint64_t step = 1; step <= 2 * scheduler::GradientLog::kSteps; ++step) {
    absl::Span<const uint8_t> updated;
    const StepDecision decision = DecideStep(&updated);
    JobCall lock(&job_.lock);
    ASSERT_TRUE(committer_.CommitDecision(decision, updated).ok());
    step_.open_step.DropAll();
    step_.progress.End();
  }
  JobCall lock(&job_.lock);
  ASSERT_TRUE(HasResidents());
  job_.failure = absl::DataLossError("why");
  ASSERT_TRUE(rounds_.Start().ok());
  EXPECT_FALSE(HasResidents());
  EXPECT_TRUE(storage::MayLag(*job_.tier->control())) << "they may stay again";
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

TEST_F(LoadRoundsTest, WhoLeavesEndsTheRoundOfALoadBesideTheState) {
  Finish(0, 10);
  load_.round.Begin(1);
  rounds_.Leave(1, "was lost");
  const absl::Status answer = AnswerTo(0, 10);
  EXPECT_EQ(answer.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(answer.message(), HasSubstr("rank 1 was lost before all ranks"));
  EXPECT_FALSE(load_.round.active());
}

// Values in place stay: only the part of the rank that left is loaded again.
TEST_F(LoadRoundsTest, OthersGoOnWithALoadInPlace) {
  SetLoaded(/*required_from=*/1, /*touched_from=*/0);
  Finish(0, 10);
  load_.round.Begin(1);
  rounds_.Leave(1, "was lost");
  EXPECT_EQ(listeners_[0]->answer_count(), 0u);
  EXPECT_TRUE(load_.round.finished(0));
  EXPECT_FALSE(load_.round.begun(1));
  EXPECT_EQ(job_.record().load_required_from, 0u);
}

TEST_F(LoadRoundsTest, UnlessSomethingIsBesideTheStateToo) {
  SetLoaded(/*required_from=*/1, /*touched_from=*/storage::kNoParameter);
  ASSERT_NO_FATAL_FAILURE(StageSomething());
  Finish(0, 10);
  load_.round.Begin(1);
  rounds_.Leave(1, "was lost");
  EXPECT_EQ(AnswerTo(0, 10).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(load_.staged.empty());
  EXPECT_EQ(job_.record().load_required_from, 1u);
}

TEST_F(LoadRoundsTest, WhoIsInNoRoundLeavesNone) {
  Finish(0, 10);
  rounds_.Leave(1, "was lost");
  EXPECT_EQ(listeners_[0]->answer_count(), 0u);
  EXPECT_TRUE(load_.round.finished(0));
}

TEST_F(LoadRoundsTest, ADropAnswersWhoWaitsAndTellsTheOthersLater) {
  ASSERT_NO_FATAL_FAILURE(StageSomething());
  Finish(0, 10);
  load_.round.Begin(1);
  const absl::Status why = absl::ResourceExhaustedError("no room");
  rounds_.Drop(why);
  EXPECT_EQ(AnswerTo(0, 10), why);
  EXPECT_EQ(load_.round.dropped(1), why);
  EXPECT_TRUE(load_.round.dropped(0).ok());
  EXPECT_EQ(listeners_[1]->answer_count(), 0u);
  EXPECT_TRUE(load_.staged.empty());
  EXPECT_TRUE(job_.tier->load_log().empty());
  EXPECT_THAT(FirstElements(), ElementsAre(7, 7));
}

}  // namespace
}  // namespace optstate::session
