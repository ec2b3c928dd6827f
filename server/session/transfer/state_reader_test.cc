#include "server/session/transfer/state_reader.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/step_rooms.h"

namespace optstate::session {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A job at step 4, whose masters are 7.
class StateReaderTest : public StepRoomFixture {
 protected:
  StateReaderTest() {
    const std::vector<float> values(3, 7);
    for (uint32_t p = 0; p < 2; ++p) {
      EXPECT_TRUE(job_.Elements()
                      .Write({v1::STATE_ARRAY_MASTER, p, 0, 3},
                             reinterpret_cast<const std::byte*>(values.data()))
                      .ok());
    }
    storage::StepRecord record = job_.record();
    record.committed_step = 4;
    storage::PublishRecord(record, job_.tier->control());
  }

  template <typename T>
  absl::StatusOr<uint64_t> Fetch(v1::StateArray array, uint32_t parameter,
                                 uint64_t begin, std::vector<T>* out) {
    return reader_.Fetch(
        array, parameter, begin, out->size(),
        absl::MakeSpan(reinterpret_cast<std::byte*>(out->data()),
                       out->size() * sizeof(T)));
  }
  absl::Status TryFetch() {
    std::vector<float> out(3);
    return Fetch(v1::STATE_ARRAY_MASTER, 0, 0, &out).status();
  }
  absl::Status TryRead(uint64_t offset_bytes, uint64_t bytes) {
    std::vector<std::byte> out(bytes);
    return reader_.ReadParameters(offset_bytes, absl::MakeSpan(out));
  }

  StateReader reader_{&job_, &decider_, &speculator_};
};

TEST_F(StateReaderTest, ReturnsTheStepOfWhatItReads) {
  std::vector<float> two(2);
  for (const v1::StateArray array :
       {v1::STATE_ARRAY_MASTER, v1::STATE_ARRAY_PARAMETER}) {
    two = {0, 0};
    const auto step = Fetch(array, 1, 1, &two);
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_EQ(*step, 4u);
    EXPECT_THAT(two, Each(7));
  }
  EXPECT_TRUE(Fetch(v1::STATE_ARRAY_STATE_0, 0, 0, &two).ok());
  EXPECT_THAT(two, Each(0));
  job_.store->step_counts()[1] = 9;
  std::vector<int64_t> counts(2);
  EXPECT_TRUE(Fetch(v1::STATE_ARRAY_STEP_COUNT, 0, 0, &counts).ok());
  EXPECT_THAT(counts, ElementsAre(0, 9));
}

TEST_F(StateReaderTest, WhatTheJobHasNotIsRefused) {
  std::vector<float> three(3);
  std::vector<float> four(4);
  std::vector<int64_t> counts(2);
  EXPECT_TRUE(absl::IsInvalidArgument(
      Fetch(v1::STATE_ARRAY_MASTER, 2, 0, &three).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      Fetch(v1::STATE_ARRAY_MASTER, 0, 0, &four).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      Fetch(v1::STATE_ARRAY_MASTER, 0, 1, &three).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      Fetch(v1::STATE_ARRAY_STEP_COUNT, 1, 0, &counts).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      Fetch(v1::STATE_ARRAY_STEP_COUNT, 0, 1, &counts).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      reader_
          .Fetch(v1::STATE_ARRAY_MASTER, 0, 0, 3,
                 absl::MakeSpan(reinterpret_cast<std::byte*>(four.data()), 8))
          .status()));
  // No step has left norms.
  EXPECT_FALSE(Fetch(v1::STATE_ARRAY_GRADIENT_NORM, 0, 0, &three).ok());
}

TEST_F(StateReaderTest, AStateOfNoStepIsNotRead) {
  storage::StepRecord record = job_.record();
  record.load_required_from = 1;
  storage::PublishRecord(record, job_.tier->control());
  const absl::Status loading = TryFetch();
  EXPECT_TRUE(absl::IsFailedPrecondition(loading)) << loading;
  EXPECT_THAT(loading.message(), HasSubstr("is loading"));
  EXPECT_TRUE(TryRead(0, 4).ok()) << "ranks read what they map as well";
  job_.recovery.emplace();
  EXPECT_TRUE(absl::IsUnavailable(TryFetch()));
  EXPECT_TRUE(absl::IsUnavailable(TryRead(0, 4)));
  job_.failure = absl::DataLossError("why");
  EXPECT_EQ(TryFetch(), job_.failure);
  EXPECT_EQ(TryRead(0, 4), job_.failure);
  EXPECT_EQ(reader_.Hint(ParameterHint::kPrefetch, 0, 1), job_.failure);
}

TEST_F(StateReaderTest, TheParameterAreaIsReadInItsBounds) {
  const uint64_t bytes = job_.layout().parameter_area_bytes();
  EXPECT_TRUE(TryRead(0, bytes).ok());
  EXPECT_TRUE(TryRead(bytes, 0).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(TryRead(bytes, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(TryRead(UINT64_MAX, 1)));
}

TEST_F(StateReaderTest, HintsAreOfParametersThatThereAre) {
  for (const ParameterHint hint :
       {ParameterHint::kPrefetch, ParameterHint::kRelease}) {
    EXPECT_TRUE(reader_.Hint(hint, 0, 2).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(reader_.Hint(hint, 1, 2)));
  }
}

}  // namespace
}  // namespace optstate::session
