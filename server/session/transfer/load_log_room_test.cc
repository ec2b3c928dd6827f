#include "server/session/transfer/load_log_room.h"

#include <algorithm>
#include <filesystem>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/upper_rooms.h"
#include "server/session/transfer/staged_load.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class LoadLogRoomTest : public UpperRoomFixture {
 protected:
  uint64_t BytesMax() const {
    return StagedLoad::BytesMax(job_.Elements(), job_.layout(),
                                job_.shape->partitions.size());
  }
  uint64_t LogBytes() const { return job_.tier->load_log().size(); }
};

TEST_F(LoadLogRoomTest, GrowsAndKeepsWhatIsThere) {
  const auto first = log_.Grow(100);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_GE(first->size(), 100u);
  std::fill_n(first->data(), 100, std::byte{5});
  const auto next = log_.Grow(BytesMax());
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->size(), LogBytes());
  EXPECT_GE(next->size(), BytesMax());
  EXPECT_THAT(next->first(100), Each(std::byte{5}));
}

TEST_F(LoadLogRoomTest, MoreThanAWholeLoadIsTooManyParts) {
  const absl::Status refused = log_.Grow(BytesMax() + 1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("load whole arrays"));
  EXPECT_EQ(LogBytes(), 0u);
}

TEST_F(LoadLogRoomTest, TheLimitsOfTheJobCount) {
  v1::Limits& limits = *job_.options.config.mutable_limits();
  limits.set_job_state_bytes_max(job_.tier->bytes());
  const absl::Status refused = log_.Grow(1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(),
              AllOf(HasSubstr("no room for a load"), HasSubstr("(1 so far)"),
                    HasSubstr("unchanged")));
  EXPECT_EQ(LogBytes(), 0u);
  limits.set_job_state_bytes_max(0);
  EXPECT_TRUE(log_.Grow(1).ok());
}

TEST_F(LoadLogRoomTest, DropForgetsTheLoadAndItsFile) {
  const float values[] = {8, 8, 8};
  log_.DropLog();
  ASSERT_TRUE(load_.staged
                  .Stage(job_.Elements(), {v1::STATE_ARRAY_MASTER, 0, 0, 3},
                         reinterpret_cast<const std::byte*>(values),
                         /*is_present=*/false,
                         [this](uint64_t bytes) { return log_.Grow(bytes); })
                  .ok());
  EXPECT_FALSE(load_.staged.empty());
  EXPECT_TRUE(std::filesystem::exists(job_.tier->load_log_path()));
  log_.DropLog();
  EXPECT_TRUE(load_.staged.empty());
  EXPECT_EQ(LogBytes(), 0u);
  EXPECT_FALSE(std::filesystem::exists(job_.tier->load_log_path()));
}

// Only the log that was begun for this state of the job is ever applied.
TEST_F(LoadLogRoomTest, TheHeaderSaysForWhichStateTheLogIs) {
  storage::StepRecord record = job_.record();
  record.loads_finished = 4;
  record.committed_step = 11;
  storage::PublishRecord(record, job_.tier->control());
  const storage::LoadLogHeader header = log_.MakeLogHeader();
  EXPECT_EQ(header.loads_finished, 4u);
  EXPECT_EQ(header.committed_step, 11u);
  EXPECT_EQ(header.incarnation, job_.tier->control()->incarnation);
}

}  // namespace
}  // namespace optstate::session
