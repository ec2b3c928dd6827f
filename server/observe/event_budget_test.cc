#include "server/observe/event_budget.h"

#include <gtest/gtest.h>

#include <optional>

namespace optstate::observe {
namespace {

class EventBudgetTest : public testing::Test {
 protected:
  int CountTold(int times) {
    int told = 0;
    for (int i = 0; i < times; ++i) told += budget_.Take().has_value() ? 1 : 0;
    return told;
  }

  absl::Time now_ = absl::UnixEpoch();
  EventBudget budget_{3, absl::Seconds(10), [this] { return now_; }};
};

TEST_F(EventBudgetTest, AFloodIsCutAndCounted) {
  EXPECT_EQ(budget_.Take(), std::optional<uint64_t>(0));
  EXPECT_EQ(CountTold(100), 2);
  EXPECT_EQ(budget_.Take(), std::nullopt);
  now_ += absl::Seconds(10);
  EXPECT_EQ(budget_.Take(), std::optional<uint64_t>(99));
  EXPECT_EQ(budget_.Take(), std::nullopt);
}

TEST_F(EventBudgetTest, ComesBackWithTimeUpToTheBurst) {
  EXPECT_EQ(CountTold(100), 3);
  now_ += absl::Seconds(25);
  EXPECT_EQ(CountTold(100), 2);
  now_ += absl::Seconds(5);  // with the half that was left
  EXPECT_EQ(CountTold(100), 1);
  now_ += absl::Hours(1);
  EXPECT_EQ(CountTold(100), 3);
}

// A flood that ends has no further one that could tell of its last ones.
TEST_F(EventBudgetTest, WhatWasLeftOutLastIsTakenByItself) {
  EXPECT_EQ(budget_.TakeLeftOut(), 0u);
  EXPECT_EQ(CountTold(100), 3);
  EXPECT_EQ(budget_.TakeLeftOut(), 0u);  // not yet
  now_ += absl::Seconds(10);
  EXPECT_EQ(budget_.TakeLeftOut(), 97u);
  now_ += absl::Seconds(10);
  EXPECT_EQ(budget_.TakeLeftOut(), 0u);
  EXPECT_EQ(budget_.Take(), std::optional<uint64_t>(0));
}

TEST_F(EventBudgetTest, WhatOthersLeftOutCountsToo) {
  EXPECT_EQ(budget_.Take(5), std::optional<uint64_t>(5));
  EXPECT_EQ(CountTold(2), 2);
  EXPECT_EQ(budget_.Take(7), std::nullopt);
  now_ += absl::Seconds(10);
  EXPECT_EQ(budget_.Take(1), std::optional<uint64_t>(9));
}

TEST_F(EventBudgetTest, AClockThatIsSetBackGivesNothing) {
  EXPECT_EQ(CountTold(100), 3);
  now_ -= absl::Hours(1);
  EXPECT_EQ(CountTold(100), 0);
  now_ += absl::Seconds(10);
  EXPECT_EQ(CountTold(100), 1);
}

}  // namespace
}  // namespace optstate::observe
