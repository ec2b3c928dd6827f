#include "server/session/job_describer.h"

#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

JobDescriber::Rooms RoomsOf(StepRooms* rooms, StateLock* state_lock) {
  return {.job = &rooms->job_,
          .ranks = &rooms->ranks_,
          .step = &rooms->step_,
          .load = &rooms->load_,
          .speculator = &rooms->speculator_,
          .committer = &rooms->committer_,
          .durability = &rooms->durability_,
          .state_lock = state_lock};
}

class JobDescriberTest : public UpperRoomFixture {
 protected:
  JobDescriber describer_{RoomsOf(this, &state_lock_)};
};

class DescriberWithoutLayoutTest : public RoomTest<StepRooms> {
 protected:
  DescriberWithoutLayoutTest() : RoomTest(std::nullopt) {}

  JobDescriber describer_{RoomsOf(this, &state_lock_)};
};

TEST_F(DescriberWithoutLayoutTest, SaysOnlyWhoseJobItIs) {
  job_.options.uid = 5;
  v1::Job job = describer_.Describe();
  EXPECT_EQ(job.name(), "test");
  EXPECT_EQ(job.uid(), 5u);
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_EMPTY);
  EXPECT_EQ(job.arrays_size(), 0);
  EXPECT_FALSE(describer_.ListParameters({}).ok());
  job_.failure = absl::DataLossError("the reason");
  job = describer_.Describe();
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
  EXPECT_EQ(job.reason(), "the reason");
}

TEST_F(JobDescriberTest, RanksThatAreAttachedAreSessions) {
  EXPECT_EQ(describer_.Describe().session_count(), 2u);
  ranks_.Leave(0);
  const v1::Job job = describer_.Describe();
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job.session_count(), 1u);
  ASSERT_EQ(job.sessions_size(), 1);
  EXPECT_EQ(job.sessions(0).rank(), 1u);
  EXPECT_EQ(job.sessions(0).staged_parameters(), 0u);
  EXPECT_FALSE(job.has_disk());
}

TEST_F(JobDescriberTest, TheOpenStepSaysForWhomItWaits) {
  EXPECT_EQ(describer_.Describe().open_step(), "");
  ASSERT_TRUE(Push(0, 0, 2).ok());
  NoteCommit(0, 10);
  EXPECT_THAT(describer_.Describe().open_step(),
              AllOf(HasSubstr("step 1: "), HasSubstr("rank 1")));
  ASSERT_TRUE(Push(1, 0, 2).ok());
  NoteCommit(1, 11);
  step_.progress.Decide();
  EXPECT_EQ(describer_.Describe().open_step(), "step 1: decided");
}

// The mark stays for the next engine, but this one takes no step any more.
TEST_F(JobDescriberTest, AStepThatFailedIsOpenNoMore) {
  absl::Span<const uint8_t> updated;
  const StepDecision decision = DecideStep(&updated);
  executor_.FailAfter(0, absl::InternalError("dies"));
  JobCall lock(&job_.lock);
  ASSERT_FALSE(committer_.CommitDecision(decision, updated).ok());
  EXPECT_EQ(describer_.Describe().open_step(), "");
  EXPECT_EQ(describer_.Describe().phase(), v1::JOB_PHASE_FAILED);
}

TEST_F(JobDescriberTest, AStepThatIsBeingFinishedIsNamed) {
  DieInStep(/*updates=*/0);
  ASSERT_TRUE(Adopt().ok());
  EXPECT_THAT(describer_.Describe().open_step(),
              HasSubstr("step 1: the engine died in it"));
}

TEST_F(JobDescriberTest, ALoadSaysHowFarItIs) {
  EXPECT_EQ(describer_.Describe().open_load(), "");
  log_.DropLog();
  load_.round.Begin(0);
  EXPECT_THAT(describer_.Describe().open_load(),
              AllOf(HasSubstr("rank 0 has begun"), HasSubstr("0 bytes")));
}

TEST_F(JobDescriberTest, ParametersComeInPages) {
  ASSERT_TRUE(Push(0, 0, 1).ok());
  job_.store->step_counts()[1] = 9;
  v1::ListParametersRequest request;
  request.set_page_size(1);
  auto page = describer_.ListParameters(request);
  ASSERT_TRUE(page.ok()) << page.status();
  ASSERT_EQ(page->parameters_size(), 1);
  EXPECT_EQ(page->parameters(0).parameter().name(), "a");
  EXPECT_TRUE(page->parameters(0).staged());
  EXPECT_EQ(page->parameters(0).owner_rank(), 0u);
  request.set_page_token(page->next_page_token());
  page = describer_.ListParameters(request);
  ASSERT_TRUE(page.ok()) << page.status();
  ASSERT_EQ(page->parameters_size(), 1);
  EXPECT_EQ(page->parameters(0).parameter().name(), "b");
  EXPECT_EQ(page->parameters(0).step_count(), 9);
  EXPECT_FALSE(page->parameters(0).staged());
  EXPECT_EQ(page->next_page_token(), "");
}

TEST_F(JobDescriberTest, OnlyTokensThatWereGivenAreTaken) {
  for (const char* token : {"x", "-1", "3", "01", "1 "}) {
    v1::ListParametersRequest request;
    request.set_page_token(token);
    EXPECT_TRUE(
        absl::IsInvalidArgument(describer_.ListParameters(request).status()))
        << token;
  }
}

// Step counts that a pass is changing are shown as they were before it.
TEST_F(JobDescriberTest, StepCountsAreThoseBeforeAPass) {
  JobCall lock(&job_.lock);
  const absl::Status made = job_.MakeCountingPass([&] {
    job_.store->step_counts()[0] = 5;
    absl::MutexLock look(&job_.lock.mu);
    const auto page = describer_.ListParameters({});
    EXPECT_TRUE(page.ok() && page->parameters(0).step_count() == 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(made.ok());
  EXPECT_EQ(describer_.ListParameters({})->parameters(0).step_count(), 5);
}

}  // namespace
}  // namespace optstate::session
