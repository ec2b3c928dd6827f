#include "server/session/transfer/load_round.h"

#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/transition_table.h"
#include "server/session/transfer/load_phase.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

// The table of README.md.
TEST(LoadPhaseTest, Transitions) {
  constexpr auto kOut = LoadPhase::kOut;
  constexpr auto kBegun = LoadPhase::kBegun;
  constexpr auto kLoading = LoadPhase::kLoading;
  constexpr auto kFinished = LoadPhase::kFinished;
  ExpectTransitions<LoadPhase>({{kOut, "out"},
                                {kBegun, "begun"},
                                {kLoading, "loading"},
                                {kFinished, "finished"}},
                               {{kOut, kBegun},
                                {kBegun, kLoading},
                                {kBegun, kFinished},
                                {kLoading, kFinished},
                                {kBegun, kOut},
                                {kLoading, kOut},
                                {kFinished, kOut}});
}

class LoadRoundTest : public ::testing::Test {
 protected:
  LoadRoundTest() {
    LayoutSpec spec;
    spec.groups.resize(1);
    ParameterSpec parameter;
    parameter.name = "a";
    parameter.shape = {100};
    parameter.numel = 100;
    spec.parameters = {parameter};
    layout_ = *Layout::Make(spec);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      partitions_.push_back(
          *MakeRankPartition(layout_, PartitionMode::kReplicated, 2, rank));
    }
    round_.Reset(&layout_, partitions_);
  }
  void LoadAll(uint32_t rank) {
    round_.Begin(rank);
    round_.NoteLoaded(rank);
    round_.NoteMaster(rank, 0, 0, 100);
  }

  Layout layout_;
  std::vector<RankPartition> partitions_;
  LoadRound round_;
};

TEST_F(LoadRoundTest, ARankGoesFromBegunToFinished) {
  EXPECT_FALSE(round_.active());
  round_.Begin(0);
  EXPECT_TRUE(round_.active());
  EXPECT_TRUE(round_.begun(0));
  EXPECT_FALSE(round_.has_loaded(0));
  round_.NoteLoaded(0);
  EXPECT_TRUE(round_.has_loaded(0));
  EXPECT_FALSE(round_.finished(0));
  round_.Finish(0, 7, {});
  EXPECT_TRUE(round_.begun(0));
  EXPECT_TRUE(round_.finished(0));
  EXPECT_EQ(round_.request_id(0), 7u);
  EXPECT_FALSE(round_.all_finished());
  LoadAll(1);
  round_.Finish(1, 8, {});
  EXPECT_TRUE(round_.all_finished());
  round_.Clear();
  EXPECT_FALSE(round_.active());
  EXPECT_FALSE(round_.begun(0));
}

TEST_F(LoadRoundTest, MastersCountInAscendingOrder) {
  round_.Begin(0);
  round_.NoteMaster(0, 0, 50, 100);
  EXPECT_THAT(round_.CheckComplete(0, 0).message(), HasSubstr("from 0 to 100"));
  round_.NoteMaster(0, 0, 0, 50);
  EXPECT_THAT(round_.CheckComplete(0, 0).message(),
              HasSubstr("from 50 to 100"));
  round_.NoteMaster(0, 0, 40, 100);
  EXPECT_TRUE(round_.CheckComplete(0, 0).ok());
  EXPECT_FALSE(round_.CheckComplete(1, 0).ok());
  EXPECT_TRUE(round_.CheckComplete(1, 1).ok());  // none is required
}

TEST_F(LoadRoundTest, BeginningAnewForgetsWhatWasLoaded) {
  LoadAll(0);
  round_.Begin(0);
  EXPECT_FALSE(round_.has_loaded(0));
  EXPECT_FALSE(round_.CheckComplete(0, 0).ok());
  round_.DropRank(0);
  EXPECT_FALSE(round_.active());
}

TEST_F(LoadRoundTest, RanksWithoutAnAnswerLearnOfADrop) {
  round_.Begin(0);
  LoadAll(1);
  round_.Finish(1, 8, {});
  round_.Drop(absl::AbortedError("why"));
  EXPECT_FALSE(round_.active());
  EXPECT_EQ(round_.dropped(0), absl::AbortedError("why"));
  EXPECT_TRUE(round_.dropped(1).ok());
  round_.Begin(0);
  EXPECT_TRUE(round_.dropped(0).ok());
}

TEST_F(LoadRoundTest, ARankThatHasNotBegunCannotGoOn) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(round_.NoteLoaded(0),
               "the load of rank 0 cannot go from out to loading");
  EXPECT_DEATH(round_.Finish(1, 7, {}),
               "the load of rank 1 cannot go from out to finished");
  LoadAll(0);
  round_.NoteLoaded(0);  // once more
  round_.Finish(0, 7, {});
  EXPECT_DEATH(round_.NoteLoaded(0), "cannot go from finished to loading");
  EXPECT_DEATH(round_.Finish(0, 8, {}), "cannot go from finished to finished");
}

TEST_F(LoadRoundTest, RanksLoadAlike) {
  for (uint32_t rank = 0; rank < 2; ++rank) LoadAll(rank);
  round_.Finish(0, 7, {.content_digest = 5});
  round_.Finish(1, 8, {});  // does not say
  EXPECT_TRUE(round_.CheckAlike().ok());
  LoadAll(1);
  round_.Finish(1, 8, {.content_digest = 6});
  EXPECT_THAT(round_.CheckAlike().message(), HasSubstr("what rank 1 has"));
}

}  // namespace
}  // namespace optstate::session
