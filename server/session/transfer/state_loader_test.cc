#include "server/session/transfer/state_loader.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A job of two ranks, of which each owns the parameter of its number.
class StateLoaderTest : public UpperRoomFixture {
 protected:
  StateLoaderTest()
      : agreement_({.job = &job_,
                    .ranks = &ranks_,
                    .step = &step_,
                    .sums = &sums_,
                    .stager = &stager_,
                    .load = &load_,
                    .rounds = &rounds_}),
        loader_({.job = &job_,
                 .ranks = &ranks_,
                 .step = &step_,
                 .stager = &stager_,
                 .agreement = &agreement_,
                 .load = &load_,
                 .log = &log_,
                 .rounds = &rounds_,
                 .applier = &applier_,
                 .gate = &gate_}) {}

  // Requires the masters from this parameter on.
  void RequireFrom(uint32_t parameter) {
    storage::StepRecord record = job_.record();
    record.load_required_from = parameter;
    storage::PublishRecord(record, job_.tier->control());
  }
  absl::Status Begin(uint32_t rank) {
    JobCall lock(&job_.lock);
    return loader_.BeginLoad(rank);
  }
  // Loads this value for each element of a parameter.
  absl::Status Load(uint32_t rank, uint32_t parameter, float value,
                    v1::StateArray array = v1::STATE_ARRAY_MASTER) {
    const std::vector<float> values(3, value);
    return LoadBytes(
        rank, array, parameter, 3,
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                            values.size() * sizeof(float)));
  }
  absl::Status LoadBytes(uint32_t rank, v1::StateArray array,
                         uint32_t parameter, uint64_t numel,
                         absl::Span<const std::byte> data) {
    JobCall lock(&job_.lock);
    return loader_.Load(rank, array, parameter, /*begin=*/0, numel,
                        DType::kFloat32, data);
  }
  absl::Status LoadCount(uint32_t rank, int64_t count) {
    return LoadBytes(
        rank, v1::STATE_ARRAY_STEP_COUNT, rank, 1,
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&count),
                            sizeof(count)));
  }
  void Finish(uint32_t rank, uint64_t request_id, const LoadEnd& end = {}) {
    JobCall lock(&job_.lock);
    loader_.FinishLoad(rank, request_id, end);
  }

  Agreement agreement_;
  StateLoader loader_;
};

TEST_F(StateLoaderTest, TheStateIsThatOfBeforeUntilAllHaveFinished) {
  ASSERT_TRUE(Begin(0).ok());
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Load(0, 0, 3).ok());
  ASSERT_TRUE(Load(1, 1, 4).ok());
  ASSERT_TRUE(LoadCount(1, 9).ok());
  Finish(0, 10);
  EXPECT_EQ(AnswerTo(0, 10).code(), absl::StatusCode::kUnknown);
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
  Finish(1, 11);
  EXPECT_TRUE(AnswerTo(0, 10).ok());
  EXPECT_TRUE(AnswerTo(1, 11).ok());
  EXPECT_THAT(FirstElements(), ElementsAre(3, 4));
  EXPECT_THAT(job_.store->step_counts(), ElementsAre(0, 9));
  EXPECT_FALSE(load_.round.active());
}

// The next engine must know what is not as it was.
TEST_F(StateLoaderTest, WhatIsLoadedInPlaceIsNotedBefore) {
  RequireFrom(1);
  ASSERT_TRUE(Begin(1).ok());
  EXPECT_EQ(job_.record().load_touched_from, storage::kNoParameter);
  ASSERT_TRUE(Load(1, 1, 4).ok());
  EXPECT_EQ(job_.record().load_touched_from, 1u);
  EXPECT_THAT(FirstElements(), ElementsAre(0, 4));
  EXPECT_TRUE(load_.staged.empty());
  // A parameter that has a state is staged in the same load.
  ASSERT_TRUE(Begin(0).ok());
  ASSERT_TRUE(Load(0, 0, 3).ok());
  EXPECT_THAT(FirstElements(), ElementsAre(0, 4));
  Finish(0, 10);
  Finish(1, 11);
  EXPECT_TRUE(AnswerTo(1, 11).ok());
  EXPECT_THAT(FirstElements(), ElementsAre(3, 4));
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
}

TEST_F(StateLoaderTest, ALoadIsBegunFirst) {
  EXPECT_TRUE(absl::IsFailedPrecondition(Load(0, 0, 3)));
  ASSERT_TRUE(Begin(0).ok());
  EXPECT_TRUE(Begin(0).ok()) << "it has loaded nothing yet";
  EXPECT_TRUE(Load(0, 0, 3).ok());
  Finish(0, 10);
  EXPECT_TRUE(absl::IsFailedPrecondition(Load(0, 0, 3))) << "it has finished";
  const absl::Status anew = Begin(0);
  EXPECT_THAT(anew.message(), HasSubstr("waits for the others"));
}

TEST_F(StateLoaderTest, OnlyOwnElementsOfTheStateAreLoaded) {
  ASSERT_TRUE(Begin(0).ok());
  const absl::Status foreign = Load(0, 1, 3);
  EXPECT_TRUE(absl::IsInvalidArgument(foreign)) << foreign;
  EXPECT_THAT(foreign.message(), HasSubstr("do not belong to rank 0"));
  for (const v1::StateArray array :
       {v1::STATE_ARRAY_PARAMETER, v1::STATE_ARRAY_GRADIENT_NORM}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Load(0, 0, 3, array)));
  }
  const std::vector<std::byte> short_data(8);
  EXPECT_TRUE(absl::IsInvalidArgument(
      LoadBytes(0, v1::STATE_ARRAY_MASTER, 0, 3, short_data)));
  EXPECT_TRUE(absl::IsInvalidArgument(LoadCount(0, -1)));
  EXPECT_TRUE(load_.staged.empty());
  EXPECT_TRUE(load_.round.begun(0)) << "a wrong call does not end the load";
}

TEST_F(StateLoaderTest, NothingIsLoadedBesideACommit) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  NoteCommit(0, 10);
  const absl::Status refused = Begin(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("rank 0 has committed step 1"));
  EXPECT_FALSE(load_.round.active());
}

TEST_F(StateLoaderTest, ABeginDropsWhatIsStaged) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  ASSERT_TRUE(Begin(0).ok());
  EXPECT_FALSE(step_.open_step.opened_by(0));
}

TEST_F(StateLoaderTest, WithoutRoomTheLoadIsOverForAll) {
  job_.options.config.mutable_limits()->set_job_state_bytes_max(1);
  ASSERT_TRUE(Begin(0).ok());
  ASSERT_TRUE(Begin(1).ok());
  Finish(1, 11);
  const absl::Status full = Load(0, 0, 3);
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_EQ(AnswerTo(1, 11), full);
  EXPECT_EQ(Load(0, 0, 3), full) << "until it begins anew";
  EXPECT_FALSE(load_.round.active());
}

// Ranks that were to load the same.
TEST_F(StateLoaderTest, UnlikeContentChangesNothing) {
  ASSERT_TRUE(Begin(0).ok());
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Load(0, 0, 3).ok());
  Finish(0, 10, {.content_digest = 5});
  Finish(1, 11, {.content_digest = 6});
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(absl::IsFailedPrecondition(AnswerTo(rank, 10 + rank)))
        << AnswerTo(rank, 10 + rank);
  }
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

TEST_F(StateLoaderTest, TheJobBeginsAtAStepWithTheEndOfALoad) {
  RequireFrom(0);
  ASSERT_TRUE(Begin(0).ok());
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Load(0, 0, 3).ok());
  ASSERT_TRUE(Load(1, 1, 4).ok());
  const LoadEnd at_7 = {.begin_at = BeginAt{7, 5}};
  Finish(0, 10, at_7);
  EXPECT_EQ(job_.record().committed_step, 0u);
  Finish(1, 11, at_7);
  EXPECT_TRUE(AnswerTo(0, 10).ok()) << AnswerTo(0, 10);
  EXPECT_TRUE(AnswerTo(1, 11).ok()) << AnswerTo(1, 11);
  EXPECT_EQ(job_.record().committed_step, 7u);
  EXPECT_EQ(job_.record().loads_finished, 5u);
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job_.LastOutcome().step, 7u);
  EXPECT_EQ(ranks_.session(1).committed_step, 7u);
  EXPECT_THAT(FirstElements(), ElementsAre(3, 4));
  // It has taken a step by now.
  ASSERT_TRUE(Begin(0).ok());
  Finish(0, 12, at_7);
  EXPECT_TRUE(absl::IsFailedPrecondition(AnswerTo(0, 12))) << AnswerTo(0, 12);
  EXPECT_THAT(AnswerTo(0, 12).message(), HasSubstr("has committed step 7"));
}

// All of such a load is in its one record.
TEST_F(StateLoaderTest, ALoadThatChangesTheStateBeginsNoStep) {
  ASSERT_TRUE(Begin(0).ok());
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Load(0, 0, 3).ok());
  for (const uint32_t rank : {0u, 1u}) {
    Finish(rank, 10 + rank, {.begin_at = BeginAt{7, 1}});
  }
  for (const uint32_t rank : {0u, 1u}) {
    const absl::Status refused = AnswerTo(rank, 10 + rank);
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(refused.message(), HasSubstr("changes parameters"));
  }
  EXPECT_EQ(job_.record().committed_step, 0u);
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

TEST_F(StateLoaderTest, RanksBeginTheJobAlike) {
  ASSERT_TRUE(Begin(0).ok());
  ASSERT_TRUE(Begin(1).ok());
  Finish(0, 10, {.begin_at = BeginAt{7, 1}});
  Finish(1, 11);
  EXPECT_TRUE(absl::IsFailedPrecondition(AnswerTo(1, 11))) << AnswerTo(1, 11);
  EXPECT_THAT(AnswerTo(1, 11).message(),
              HasSubstr("rank 1 has the job begin nowhere, and rank 0 at step "
                        "7 after 1 loads"));
  EXPECT_EQ(job_.record().committed_step, 0u);
  EXPECT_FALSE(load_.round.active());
}

TEST_F(StateLoaderTest, AMasterThatIsRequiredIsMissed) {
  RequireFrom(0);
  ASSERT_TRUE(Begin(0).ok());
  Finish(0, 10);
  EXPECT_TRUE(absl::IsFailedPrecondition(AnswerTo(0, 10))) << AnswerTo(0, 10);
  ASSERT_TRUE(Load(0, 0, 3).ok()) << "it may go on";
}

}  // namespace
}  // namespace optstate::session
