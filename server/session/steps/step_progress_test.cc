#include "server/session/steps/step_progress.h"

#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {
namespace {

class StepProgressTest : public RoomFixture {
 protected:
  StepProgressTest() { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }

  StepProgress& progress() { return step_.progress; }
  uint64_t marked_step() const {
    return job_.tier->control()->step_in_progress.load();
  }
  void OpenStep1() {
    progress().Open();
    step_.open_step.NoteStaged(0, 0, 0);
  }
  void RecordStep1() {
    storage::StepRecord record = job_.record();
    record.committed_step = 1;
    progress().Record(record);
  }
};

TEST_F(StepProgressTest, WhatHasArrivedMakesAStepOpen) {
  EXPECT_EQ(progress().phase(), StepPhase::kNone);
  progress().Open();
  EXPECT_EQ(progress().phase(), StepPhase::kNone) << "nothing has arrived";
  step_.open_step.NoteStaged(0, 0, 0);
  EXPECT_EQ(progress().phase(), StepPhase::kOpen);
  progress().Open();  // no effect
  step_.open_step.DropAll();
  EXPECT_EQ(progress().phase(), StepPhase::kNone);
}

TEST_F(StepProgressTest, AnAppliedStep) {
  OpenStep1();
  progress().Decide();
  EXPECT_EQ(progress().phase(), StepPhase::kDecided);
  EXPECT_EQ(marked_step(), 0u);
  progress().Mark(1);
  EXPECT_EQ(progress().phase(), StepPhase::kApplying);
  EXPECT_EQ(marked_step(), 1u);
  RecordStep1();
  EXPECT_EQ(progress().phase(), StepPhase::kRecorded);
  EXPECT_EQ(marked_step(), 0u);
  EXPECT_EQ(job_.record().committed_step, 1u);
  step_.open_step.DropAll();
  EXPECT_EQ(progress().phase(), StepPhase::kRecorded) << "until it is ended";
  progress().End();
  EXPECT_EQ(progress().phase(), StepPhase::kNone);
}

TEST_F(StepProgressTest, ASkippedStepIsNeverMarked) {
  OpenStep1();
  progress().Decide();
  RecordStep1();
  EXPECT_EQ(progress().phase(), StepPhase::kRecorded);
}

// The speculation of a decided step cannot always be rolled back.
TEST_F(StepProgressTest, ADecidedStepCanEnd) {
  OpenStep1();
  progress().Decide();
  step_.open_step.DropAll();
  progress().End();
  EXPECT_EQ(progress().phase(), StepPhase::kNone);
}

// A step that the store failed to apply is the next engine's.
TEST_F(StepProgressTest, AMarkedStepStaysSoUntilItIsRecorded) {
  OpenStep1();
  progress().Decide();
  progress().Mark(1);
  step_.open_step.DropAll();
  progress().End();
  EXPECT_EQ(progress().phase(), StepPhase::kApplying);
  StepState next_engine(&job_);
  EXPECT_EQ(next_engine.progress.phase(), StepPhase::kApplying);
  storage::StepRecord record = job_.record();
  record.committed_step = 1;
  next_engine.progress.Record(record);
  EXPECT_EQ(next_engine.progress.phase(), StepPhase::kRecorded);
}

// An engine may die between the record and the clearing of the mark.
TEST_F(StepProgressTest, AMarkOfTheCommittedStepSaysNothing) {
  storage::StepRecord record = job_.record();
  record.committed_step = 1;
  storage::PublishRecord(record, job_.tier->control());
  job_.tier->control()->step_in_progress = 1;
  EXPECT_EQ(progress().phase(), StepPhase::kNone);
}

// The phase within Record(), which the observer sees.
TEST_F(StepProgressTest, IsRecordedFromTheMomentOfItsRecord) {
  struct Observer final : public scheduler::StepObserver {
    void OnStepRecorded(uint64_t /*step*/) override {
      phase = progress->phase();
    }
    StepProgress* progress = nullptr;
    StepPhase phase = StepPhase::kNone;
  } observer;
  observer.progress = &progress();
  job_.options.observer = &observer;
  OpenStep1();
  progress().Decide();
  progress().Mark(1);
  RecordStep1();
  job_.options.observer = nullptr;
  EXPECT_EQ(observer.phase, StepPhase::kRecorded);
}

TEST_F(StepProgressTest, OtherTransitionsEndTheProcess) {
  EXPECT_DEATH(progress().Decide(), "step 1 cannot go from none to decided");
  EXPECT_DEATH(progress().Mark(1), "from none to applying");
  EXPECT_DEATH(RecordStep1(), "from none to recorded");
  OpenStep1();
  EXPECT_DEATH(progress().Mark(1), "from open to applying");
  EXPECT_DEATH(RecordStep1(), "from open to recorded");
  progress().Decide();
  EXPECT_DEATH(progress().Decide(), "from decided to decided");
  EXPECT_DEATH(progress().Open(), "from decided to open");
  progress().Mark(1);
  EXPECT_DEATH(progress().Mark(1), "from applying to applying");
  EXPECT_DEATH(progress().Open(), "from applying to open");
  RecordStep1();
  EXPECT_DEATH(RecordStep1(), "step 2 cannot go from recorded to recorded");
}

}  // namespace
}  // namespace optstate::session
