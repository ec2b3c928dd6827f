#include "storage/format/step_intent.h"

#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

class StepIntentTest : public ::testing::Test {
 protected:
  StepIntentTest() : file_(StepIntentBytes(2, 5)) {
    StepIntentHeader header = {};
    header.record.committed_step = 7;
    header.record.clip_coefficient = 0.5;
    header.gradient_limit = 3;
    header_ = header;
    Write({});
  }
  void Write(const std::vector<uint64_t>& pushed_by) {
    WriteStepIntent(header_, groups_, updated_, pushed_by,
                    absl::MakeSpan(file_));
  }
  absl::Status Read(uint64_t step = 7, uint64_t groups = 2,
                    uint64_t parameters = 5) {
    return ReadStepIntent(file_, step, groups, parameters, &intent_);
  }

  const std::vector<StepIntentGroup> groups_ = {
      {{.value = {1, 2, 3, 4, 5, 0}}, 0.25},
      {{.value = {6, 7, 8, 9, 10, 1}, .max_norm = 2}, 0.125}};
  const std::vector<uint8_t> updated_ = {1, 0, 1, 1, 0};
  StepIntentHeader header_ = {};
  std::vector<std::byte> file_;
  StepIntent intent_;
};

TEST_F(StepIntentTest, ReadsWhatWasWritten) {
  ASSERT_TRUE(Read().ok());
  EXPECT_EQ(intent_.header.record.clip_coefficient, 0.5);
  EXPECT_EQ(intent_.header.gradient_limit, 3);
  EXPECT_EQ(intent_.groups[0].gradient_factor, 0.25);
  EXPECT_EQ(intent_.groups[1].hyperparams[4], 10);
  EXPECT_EQ(intent_.groups[1].hyperparams.max_norm, 2);
  EXPECT_EQ(intent_.groups[1].gradient_factor, 0.125);
  EXPECT_THAT(intent_.updated, ElementsAreArray(updated_));
  EXPECT_TRUE(intent_.pushed_by.empty());
}

TEST_F(StepIntentTest, WhoPushedIsTheLastStepsOwn) {
  const std::vector<uint64_t> pushed_by = {1, 0, uint64_t{1} << 63, 3, 0};
  Write(pushed_by);
  ASSERT_TRUE(Read().ok());
  EXPECT_THAT(intent_.pushed_by, ElementsAreArray(pushed_by));
  EXPECT_THAT(intent_.updated, ElementsAreArray(updated_));
  Write({});
  ASSERT_TRUE(Read().ok());
  EXPECT_TRUE(intent_.pushed_by.empty());
}

TEST_F(StepIntentTest, OtherStepOrLayout) {
  EXPECT_THAT(Read(8).message(), HasSubstr("is of step 7"));
  EXPECT_THAT(Read(7, 1).message(), HasSubstr("2 groups"));
  EXPECT_THAT(Read(7, 2, 4).message(), HasSubstr("5 parameters"));
  EXPECT_THAT(Read(7, 2, 6).message(), HasSubstr("bytes"));
}

TEST_F(StepIntentTest, EveryFlippedBitIsNoticed) {
  Write({1, 0, 2, 3, 0});
  for (size_t bit = 0; bit < file_.size() * 8; ++bit) {
    file_[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_EQ(Read().code(), absl::StatusCode::kDataLoss) << "bit " << bit;
    file_[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_TRUE(Read().ok());
}

}  // namespace
}  // namespace optstate::storage
