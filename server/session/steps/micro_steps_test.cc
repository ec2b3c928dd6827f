#include "server/session/steps/micro_steps.h"

#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kNone = MicroSteps::kNone;

class MicroStepsTest : public ::testing::Test {
 protected:
  MicroStepsTest() { steps_.Reset(&layout_, 3); }

  static Layout ThreeParameters() {
    LayoutSpec spec;
    spec.groups = {{}};
    for (const char* name : {"a", "b", "empty"}) {
      ParameterSpec parameter;
      parameter.name = name;
      parameter.numel = name[0] == 'e' ? 0 : 10;
      parameter.shape = {parameter.numel};
      spec.parameters.push_back(parameter);
    }
    return *Layout::Make(std::move(spec));
  }
  absl::Status Push(uint32_t rank, uint32_t micro_step, uint32_t parameter) {
    absl::Status status =
        steps_.CheckPush(rank, micro_step, parameter, parameter + 1);
    if (!status.ok()) return status;
    steps_.NotePush(rank, micro_step, parameter, parameter + 1);
    steps_.NotePast(rank, micro_step);
    return status;
  }
  // Returns the parameters that were taken, and fills their `micro_step`.
  std::vector<uint32_t> Take(int64_t* micro_step) {
    absl::Span<const scheduler::StageAction> actions;
    *micro_step = steps_.TakeWhole(0, 3, &actions);
    std::vector<uint32_t> taken;
    if (*micro_step == kNone) return taken;
    for (uint32_t p = 0; p < actions.size(); ++p) {
      if (actions[p] == scheduler::StageAction::kStage) taken.push_back(p);
    }
    return taken;
  }
  void ExpectTaken(int64_t micro_step, const std::vector<uint32_t>& taken) {
    int64_t found;
    EXPECT_EQ(Take(&found), taken);
    EXPECT_EQ(found, micro_step);
  }
  void ExpectNothing() { ExpectTaken(kNone, {}); }

  const Layout layout_ = ThreeParameters();
  MicroSteps steps_;
};

TEST_F(MicroStepsTest, AMicroStepIsWholeWhenAllHavePushedIt) {
  ASSERT_TRUE(Push(0, 0, 0).ok());
  ASSERT_TRUE(Push(2, 0, 1).ok());
  ASSERT_TRUE(Push(2, 0, 0).ok());
  ExpectNothing();
  EXPECT_EQ(steps_.waiting(2), 2);
  ASSERT_TRUE(Push(1, 0, 0).ok());
  ExpectTaken(0, {0});
  ExpectNothing();
  EXPECT_EQ(steps_.waiting(0), 0);
  EXPECT_EQ(steps_.waiting(2), 1);
  EXPECT_EQ(steps_.summed(0), 0);
  EXPECT_THAT(steps_.SummedParameters(), ElementsAre(1, 0, 0));
}

TEST_F(MicroStepsTest, WhoIsPastItAddsNothing) {
  ASSERT_TRUE(Push(0, 0, 0).ok());
  steps_.NotePast(1, 1);            // has ended it
  ASSERT_TRUE(Push(2, 3, 1).ok());  // has begun a later one
  ExpectTaken(0, {0});
  EXPECT_TRUE(steps_.HasPushed(0, 0, 0));
  EXPECT_FALSE(steps_.HasPushed(1, 0, 0));
  steps_.NotePast(0, MicroSteps::kAll);  // has committed
  ExpectNothing();                       // rank 1 is not past 3
  ASSERT_TRUE(Push(1, 3, 1).ok());
  ExpectTaken(3, {1});
  EXPECT_FALSE(steps_.HasPushed(0, 1, 3));
}

// Rank 2 has no gradient of "a" at 0 and 1, rank 0 none at 1.
TEST_F(MicroStepsTest, TheLowestComesFirst) {
  ASSERT_TRUE(Push(2, 2, 0).ok());
  ASSERT_TRUE(Push(0, 0, 0).ok());
  ExpectNothing();
  ASSERT_TRUE(Push(1, 1, 0).ok());
  ExpectTaken(0, {0});
  steps_.NotePast(0, 2);
  ExpectTaken(1, {0});
  ExpectNothing();
  steps_.NotePast(0, 3);
  steps_.NotePast(1, 3);
  ExpectTaken(2, {0});
  EXPECT_EQ(steps_.summed(0), 2);
}

TEST_F(MicroStepsTest, OneAtATime) {
  ASSERT_TRUE(Push(0, 0, 0).ok());
  ASSERT_TRUE(Push(0, 0, 0).ok());  // a repeat
  EXPECT_EQ(steps_.waiting(0), 1);
  EXPECT_THAT(Push(0, 1, 0).message(), HasSubstr("before its gradient of"));
  EXPECT_TRUE(Push(0, 1, 1).ok());
  const absl::Status late = Push(0, 0, 1);
  EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(late.message(), HasSubstr("micro-steps must ascend"));
  steps_.NotePast(0, 5);
  EXPECT_THAT(Push(0, 4, 1).message(), HasSubstr("rank 0 has ended already"));
  EXPECT_TRUE(Push(0, 4, 2).ok()) << "of no elements";
}

// A gradient that is pushed again before it was taken is waited for once.
TEST_F(MicroStepsTest, AnEmptyParameterIsWaitedForOnce) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  ASSERT_TRUE(Push(0, 1, 2).ok());
  EXPECT_EQ(steps_.waiting(0), 1);
}

TEST_F(MicroStepsTest, DroppedRanksAndSums) {
  ASSERT_TRUE(Push(0, 0, 0).ok());
  ASSERT_TRUE(Push(1, 0, 0).ok());
  steps_.DropRank(1);
  EXPECT_FALSE(steps_.any_summed());
  steps_.NotePast(2, 1);
  ExpectNothing();
  ASSERT_TRUE(Push(1, 0, 0).ok());
  ExpectTaken(0, {0});
  EXPECT_TRUE(steps_.any_summed());
  steps_.DropAll();
  EXPECT_FALSE(steps_.any_summed());
  EXPECT_EQ(steps_.past(2), 0);
  EXPECT_TRUE(Push(0, 0, 0).ok());
  ExpectNothing();
}

TEST_F(MicroStepsTest, GoesOnFromAFormerEnginesSums) {
  steps_.NoteSummed(0, 4);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(Push(rank, 4, 0).ok()) << "a repeat";
    EXPECT_EQ(steps_.waiting(rank), 0);
    EXPECT_FALSE(Push(rank, 3, 0).ok());
    EXPECT_TRUE(Push(rank, 5, 0).ok());
  }
  ExpectTaken(5, {0});
}

}  // namespace
}  // namespace optstate::session
