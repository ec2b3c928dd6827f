#include "server/session/steps/staging_marks.h"

#include "gtest/gtest.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {
namespace {

class StagingMarksTest : public RoomFixture {
 protected:
  StagingMarks marks_{&job_, &ranks_, &step_};
};

TEST_F(StagingMarksTest, AStepHasAnEpochOfItsOwn) {
  const uint32_t before = job_.rank_mark(1).epoch;
  const uint64_t first = marks_.BeginStaging(1, 1, 0);
  EXPECT_EQ(job_.rank_mark(1).step, 1u);
  EXPECT_EQ(job_.rank_mark(1).epoch, storage::EpochAfter(before));
  EXPECT_EQ(first, storage::StagedMark(storage::EpochAfter(before), 0));
  EXPECT_EQ(marks_.BeginStaging(1, 1, 2),
            storage::StagedMark(storage::EpochAfter(before), 2));
  EXPECT_EQ(storage::EpochOf(marks_.BeginStaging(1, 2, 0)),
            storage::EpochAfter(storage::EpochAfter(before)));
  EXPECT_EQ(job_.rank_mark(0).step, 0u);  // each rank has its own
}

TEST_F(StagingMarksTest, ANewEpochInvalidatesWhatIsStaged) {
  const uint64_t first = marks_.BeginStaging(1, 1, 0);
  marks_.RenewEpoch(1);
  EXPECT_NE(storage::EpochOf(first), job_.rank_mark(1).epoch);
  EXPECT_EQ(job_.rank_mark(1).step, 1u);
}

class SharedStagingMarksTest : public RoomFixture {
 protected:
  static RegisterSpec Accumulating() {
    RegisterSpec spec = TwoRanks();
    spec.partition = PartitionMode::kReplicated;
    spec.accumulate = true;
    return spec;
  }
  SharedStagingMarksTest() : RoomFixture(Accumulating()) {}

  StagingMarks marks_{&job_, &ranks_, &step_};
};

TEST_F(SharedStagingMarksTest, RanksThatAreSummedShareRank0sMark) {
  marks_.BeginStaging(1, 1, 0);
  EXPECT_EQ(job_.rank_mark(0).step, 1u);
  EXPECT_EQ(job_.rank_mark(1).step, 0u);
}

TEST_F(SharedStagingMarksTest, EndsThatCountAreCarriedIntoANewEpoch) {
  marks_.BeginStaging(0, 1, 0);
  const uint32_t epoch = job_.rank_mark(0).epoch;
  step_.micro_steps.NotePast(0, 1);
  job_.rank_mark(0).ended = 1;
  job_.rank_mark(0).ended_epoch = epoch;
  // This one is of a former engine: the rank has not ended it here.
  job_.rank_mark(1).ended = 2;
  job_.rank_mark(1).ended_epoch = epoch;
  marks_.RenewEpoch(0);
  EXPECT_EQ(job_.rank_mark(0).ended_epoch, job_.rank_mark(0).epoch);
  EXPECT_EQ(job_.rank_mark(1).ended_epoch, 0u);
}

}  // namespace
}  // namespace optstate::session
