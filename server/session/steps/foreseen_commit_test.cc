#include "server/session/steps/foreseen_commit.h"

#include <vector>

#include "gtest/gtest.h"

namespace optstate::session {
namespace {

struct Commit {
  explicit Commit(double learning_rate) {
    groups[1].value[0] = learning_rate;
    spec.groups = groups;
  }
  std::vector<Hyperparams> groups = std::vector<Hyperparams>(2);
  CommitSpec spec;
};

class ForeseenCommitTest : public ::testing::Test {
 protected:
  ForeseenCommitTest() { foreseen_.Reset(2); }
  // Notes the commit until it is foreseen; returns how often.
  int StepsUntilForeseen(const CommitSpec& spec) {
    for (int steps = 0; steps < 100; ++steps) {
      if (foreseen_.spec() != nullptr) return steps;
      foreseen_.Note(spec, /*is_plain=*/true);
    }
    return -1;
  }
  ForeseenCommit foreseen_;
};

TEST_F(ForeseenCommitTest, EqualCommitsForetellAnother) {
  EXPECT_EQ(foreseen_.spec(), nullptr);
  EXPECT_EQ(StepsUntilForeseen(Commit(0.5).spec), ForeseenCommit::kSteps);
  EXPECT_EQ(foreseen_.spec()->groups[1].value[0], 0.5);  // a copy
  EXPECT_TRUE(foreseen_.is_plain());
  foreseen_.Reset(2);
  EXPECT_EQ(foreseen_.spec(), nullptr);
  EXPECT_TRUE(foreseen_.is_plain());
}

TEST_F(ForeseenCommitTest, NothingIsForeseenAfterAChange) {
  StepsUntilForeseen(Commit(0.5).spec);
  foreseen_.Note(Commit(0.25).spec, true);
  EXPECT_EQ(StepsUntilForeseen(Commit(0.25).spec), ForeseenCommit::kSteps - 1);
  for (double CommitSpec::*field :
       {&CommitSpec::grad_scale, &CommitSpec::max_norm, &CommitSpec::max_value,
        &CommitSpec::norm_type}) {
    Commit changed(0.25);
    changed.spec.*field = 3;
    foreseen_.Note(changed.spec, true);
    EXPECT_EQ(foreseen_.spec(), nullptr);
    EXPECT_TRUE(foreseen_.is_plain());
    EXPECT_EQ(StepsUntilForeseen(changed.spec), ForeseenCommit::kSteps - 1);
  }
  const std::vector<uint32_t> together = {0, 1};
  Commit clipped(0.25);
  clipped.spec.norm_type = 3;
  clipped.spec.clips_with = together;
  foreseen_.Note(clipped.spec, true);
  EXPECT_EQ(foreseen_.spec(), nullptr);
}

TEST_F(ForeseenCommitTest, NorAfterAStepThatWasSkippedOrClipped) {
  const Commit commit(0.5);
  StepsUntilForeseen(commit.spec);
  foreseen_.Note(commit.spec, /*is_plain=*/false);
  EXPECT_FALSE(foreseen_.is_plain());
  EXPECT_EQ(StepsUntilForeseen(commit.spec), ForeseenCommit::kSteps);
}

TEST_F(ForeseenCommitTest, NorAfterAStepThatWasRolledBack) {
  const Commit commit(0.5);
  StepsUntilForeseen(commit.spec);
  foreseen_.NoteRolledBack();
  EXPECT_EQ(foreseen_.spec(), nullptr);
  EXPECT_FALSE(foreseen_.is_plain());
  EXPECT_EQ(StepsUntilForeseen(commit.spec), ForeseenCommit::kSteps);
  EXPECT_TRUE(foreseen_.is_plain());
}

}  // namespace
}  // namespace optstate::session
