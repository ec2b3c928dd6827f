#include "server/supervisor/creation_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CreationBudgetTest : public testing::Test {
 protected:
  // Returns how many jobs the user may have made now, one after the other.
  int TakeAll(const std::string& user) {
    int taken = 0;
    while (budget_.Take(user).ok()) ++taken;
    return taken;
  }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  CreationBudget budget_{[this] { return now_; }};
};

TEST_F(CreationBudgetTest, AFloodGetsItsBurstAndThenARate) {
  EXPECT_EQ(TakeAll("uid 1"), static_cast<int>(CreationBudget::kBurst));
  // A refusal costs nothing.
  EXPECT_EQ(TakeAll("uid 1"), 0);
  now_ += absl::Seconds(1);
  EXPECT_EQ(TakeAll("uid 1"), static_cast<int>(CreationBudget::kPerSecond));
}

TEST_F(CreationBudgetTest, TheRefusalNamesTheUserAndSaysWhatToDo) {
  TakeAll("uid 1");
  const absl::Status refused = budget_.Take("uid 1");
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("uid 1 has had more than 100 jobs made"),
                    HasSubstr("connect again")));
}

TEST_F(CreationBudgetTest, OneUsersFloodIsNoOthers) {
  TakeAll("uid 1");
  EXPECT_EQ(TakeAll("uid 2"), static_cast<int>(CreationBudget::kBurst));
}

TEST_F(CreationBudgetTest, ABudgetThatIsFullAgainIsForgotten) {
  EXPECT_TRUE(budget_.Take("uid 1").ok());
  EXPECT_EQ(budget_.users(), 1u);
  now_ += absl::Seconds(1) / CreationBudget::kPerSecond;
  EXPECT_TRUE(budget_.Take("uid 2").ok());
  EXPECT_EQ(budget_.users(), 1u);
}

TEST_F(CreationBudgetTest, AClockThatGoesBackTakesNothing) {
  EXPECT_TRUE(budget_.Take("uid 1").ok());
  now_ -= absl::Hours(1);
  EXPECT_EQ(TakeAll("uid 1"), static_cast<int>(CreationBudget::kBurst) - 1);
}

}  // namespace
}  // namespace optstate::supervisor
