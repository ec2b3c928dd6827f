#include "server/session/steps/step_decider.h"

#include <cmath>
#include <limits>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;

// One rank, whose gradients of two parameters are (3, 0, 4) and (0, 12, 0).
class StepDeciderTest : public RoomFixture {
 protected:
  static RegisterSpec OneRank() {
    RegisterSpec spec = TwoRanks();
    spec.world_size = 1;
    spec.local_world_size = 1;
    return spec;
  }
  StepDeciderTest()
      : RoomFixture(OneRank()), groups_(2, AdamHyperparams()), updated_(2, 1) {
    commit_.step = 1;
    commit_.groups = groups_;
  }

  void Put(uint32_t parameter, const std::vector<float>& values) {
    const Piece& piece = job_.shape->partitions[0].pieces[parameter];
    std::copy(values.begin(), values.end(),
              area_.begin() + static_cast<int64_t>(piece.gradient_offset_bytes /
                                                   sizeof(float)));
  }
  StepDecision Decide() {
    area_.resize(job_.shape->partitions[0].gradient_area_bytes / sizeof(float) +
                 1);
    Put(0, {3, 0, a2_});
    Put(1, {0, 12, 0});
    ranks_.gradient_area(0) = reinterpret_cast<const std::byte*>(area_.data());
    OpenStep::Push push;
    EXPECT_TRUE(step_.open_step.PlanPush(0, 0, 0, 2, false, &push).ok());
    job_.scheduler->Stage({.gradient_areas = ranks_.gradient_areas(),
                           .first_piece = push.first_piece,
                           .actions = push.actions});
    step_.open_step.NoteCommit(0, 1, commit_);
    const absl::MutexLock lock(&job_.lock.mu);
    return decider_.Decide(1, updated_);
  }

  std::vector<Hyperparams> groups_;
  CommitSpec commit_;
  std::vector<uint8_t> updated_;
  std::vector<float> area_;
  float a2_ = 4;
};

TEST_F(StepDeciderTest, FindsTheNormOfUnscaledGradients) {
  commit_.grad_scale = 2;
  const StepDecision decision = Decide();
  EXPECT_EQ(decision.outcome.step, 1u);
  EXPECT_TRUE(decision.outcome.applied);
  EXPECT_EQ(decision.outcome.gradient_norm, 13.0 / 2);
  EXPECT_EQ(decision.outcome.clip_coefficient, 1);
  EXPECT_FALSE(decision.clipped);
  for (const storage::StepIntentGroup& group : decider_.groups()) {
    EXPECT_EQ(group.gradient_factor, 0.5);
  }
}

TEST_F(StepDeciderTest, LeavesOutWhatIsNotUpdated) {
  updated_ = {1, 0};
  EXPECT_EQ(Decide().outcome.gradient_norm, 5);
  decider_.KeepGradientNorms(1, updated_);
  EXPECT_THAT(decider_.gradient_norms(), ElementsAre(5, -1));
}

TEST_F(StepDeciderTest, OtherNorms) {
  commit_.norm_type = 1;
  EXPECT_EQ(Decide().outcome.gradient_norm, 19);
  step_.open_step.DropAll();
  commit_.norm_type = std::numeric_limits<double>::infinity();
  EXPECT_EQ(Decide().outcome.gradient_norm, 12);
}

TEST_F(StepDeciderTest, ClipsAllAndEachGroup) {
  commit_.max_norm = 6.5;
  groups_[1].max_norm = 3;
  const StepDecision decision = Decide();
  const double all = 6.5 / (13 + 1e-6);
  EXPECT_TRUE(decision.clipped);
  EXPECT_EQ(decision.outcome.clip_coefficient, all);
  EXPECT_EQ(decider_.groups()[0].gradient_factor, all);
  EXPECT_EQ(decider_.groups()[1].gradient_factor, all * (3 / (12 + 1e-6)));
  for (const storage::StepIntentGroup& group :
       decider_.GroupsWithoutClipping(commit_)) {
    EXPECT_EQ(group.gradient_factor, 1);
  }
}

TEST_F(StepDeciderTest, SkipsWhatIsNotFinite) {
  a2_ = std::numeric_limits<float>::infinity();
  StepDecision decision = Decide();
  EXPECT_TRUE(decision.outcome.found_inf);
  EXPECT_FALSE(decision.outcome.applied);
  step_.open_step.DropAll();
  a2_ = 4;
  commit_.found_inf = true;  // a rank says so
  decision = Decide();
  EXPECT_EQ(decision.outcome.gradient_norm, 13);
  EXPECT_FALSE(decision.outcome.applied);
}

TEST_F(StepDeciderTest, NormsAreOfTheCommittedStep) {
  EXPECT_FALSE(decider_.CheckGradientNorms().ok());
  Decide();
  decider_.KeepGradientNorms(1, updated_);
  EXPECT_FALSE(decider_.CheckGradientNorms().ok()) << "it is not committed";
  storage::StepRecord record = job_.record();
  record.committed_step = 1;
  storage::PublishRecord(record, job_.tier->control());
  EXPECT_TRUE(decider_.CheckGradientNorms().ok());
}

}  // namespace
}  // namespace optstate::session
