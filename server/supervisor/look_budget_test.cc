#include "server/supervisor/look_budget.h"

#include <gtest/gtest.h>

namespace optstate::supervisor {
namespace {

class LookBudgetTest : public testing::Test {
 protected:
  absl::Time now_ = absl::FromUnixSeconds(1000);
  LookBudget budget_{[this] { return now_; }};
};

TEST_F(LookBudgetTest, AFloodGetsItsBurstAndThenAShareOfTheTime) {
  EXPECT_TRUE(budget_.MayLook("uid 1"));
  budget_.Charge("uid 1", LookBudget::kBurst / 2);
  EXPECT_TRUE(budget_.MayLook("uid 1"));
  budget_.Charge("uid 1", LookBudget::kBurst / 2);
  EXPECT_FALSE(budget_.MayLook("uid 1"));
  now_ += absl::Milliseconds(1);
  EXPECT_TRUE(budget_.MayLook("uid 1"));
  // Time that a look takes beyond the budget is paid for before the next.
  budget_.Charge("uid 1", absl::Milliseconds(10));
  EXPECT_FALSE(budget_.MayLook("uid 1"));
  now_ += absl::Milliseconds(10) / LookBudget::kShare - absl::Milliseconds(2);
  EXPECT_FALSE(budget_.MayLook("uid 1"));
  now_ += absl::Milliseconds(2);
  EXPECT_TRUE(budget_.MayLook("uid 1"));
}

TEST_F(LookBudgetTest, OnePeersFloodIsNoOthers) {
  budget_.Charge("uid 1", 2 * LookBudget::kBurst);
  EXPECT_FALSE(budget_.MayLook("uid 1"));
  EXPECT_TRUE(budget_.MayLook("uid 2"));
}

TEST_F(LookBudgetTest, ABudgetThatIsFullAgainIsForgotten) {
  budget_.Charge("uid 1", LookBudget::kBurst);
  EXPECT_EQ(budget_.peers(), 1u);
  now_ += LookBudget::kBurst / LookBudget::kShare + absl::Milliseconds(1);
  budget_.Charge("uid 2", absl::Milliseconds(1));
  EXPECT_EQ(budget_.peers(), 1u);
  EXPECT_TRUE(budget_.MayLook("uid 1"));
}

TEST_F(LookBudgetTest, AClockThatGoesBackTakesNothing) {
  budget_.Charge("uid 1", LookBudget::kBurst / 2);
  now_ -= absl::Hours(1);
  EXPECT_TRUE(budget_.MayLook("uid 1"));
}

}  // namespace
}  // namespace optstate::supervisor
