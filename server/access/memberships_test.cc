#include "server/access/memberships.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace optstate::access {
namespace {

class MembershipsTest : public testing::Test {
 protected:
  MembershipsTest()
      : memberships_(
            {.find_user =
                 [this](const std::string& name) -> absl::StatusOr<uid_t> {
               ++questions_;
               const auto found = users_.find(name);
               if (found != users_.end()) return found->second;
               return absl::NotFoundError(name);
             },
             .find_group =
                 [this](const std::string& name) -> absl::StatusOr<gid_t> {
               ++questions_;
               const auto found = groups_.find(name);
               if (found != groups_.end()) return found->second;
               return absl::NotFoundError(name);
             },
             .groups_of = [this](uid_t uid) -> absl::StatusOr<std::set<gid_t>> {
               ++questions_;
               if (!failure_.ok()) return failure_;
               return groups_of_[uid];
             }},
            [this] { return now_; }) {}

  std::map<std::string, uid_t> users_ = {{"alice", 1000}};
  std::map<std::string, gid_t> groups_ = {{"ops", 50}, {"research", 60}};
  std::map<uid_t, std::set<gid_t>> groups_of_ = {{1000, {1000, 50}}};
  absl::Status failure_;
  int questions_ = 0;
  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
  Memberships memberships_;
};

TEST_F(MembershipsTest, AnswersAreThoseOfTheTables) {
  EXPECT_TRUE(memberships_.IsUser(1000, "alice"));
  EXPECT_FALSE(memberships_.IsUser(1001, "alice"));
  EXPECT_FALSE(memberships_.IsUser(1000, "bob"));
  EXPECT_TRUE(memberships_.IsIn(1000, "ops"));
  EXPECT_FALSE(memberships_.IsIn(1000, "research"));
  EXPECT_FALSE(memberships_.IsIn(1001, "ops"));
  EXPECT_FALSE(memberships_.IsIn(1000, "no such group"));
}

TEST_F(MembershipsTest, AnAnswerIsKeptForAWhile) {
  EXPECT_FALSE(memberships_.IsIn(1001, "ops"));
  const int asked = questions_;
  groups_of_[1001] = {50};
  EXPECT_FALSE(memberships_.IsIn(1001, "ops"));
  EXPECT_EQ(questions_, asked);
  now_ += Memberships::kAgeMax;
  EXPECT_TRUE(memberships_.IsIn(1001, "ops"));
  // One who was removed from a group is out as late.
  groups_of_[1001].clear();
  now_ += Memberships::kAgeMax - absl::Milliseconds(1);
  EXPECT_TRUE(memberships_.IsIn(1001, "ops"));
  now_ += absl::Milliseconds(1);
  EXPECT_FALSE(memberships_.IsIn(1001, "ops"));
}

TEST_F(MembershipsTest, WhoCannotBeLookedUpIsNoMember) {
  failure_ = absl::UnavailableError("the directory does not answer");
  EXPECT_FALSE(memberships_.IsIn(1000, "ops"));
  failure_ = absl::OkStatus();
  now_ += Memberships::kAgeMax;
  EXPECT_TRUE(memberships_.IsIn(1000, "ops"));
}

TEST_F(MembershipsTest, AnswersAreBounded) {
  for (size_t i = 0; i < 2 * Memberships::kAnswersMax; ++i) {
    EXPECT_FALSE(memberships_.IsUser(1, absl::StrCat("user", i)));
  }
  EXPECT_TRUE(memberships_.IsUser(1000, "alice"));
}

TEST(MachineMembershipsTest, KnowsTheMachine) {
  EXPECT_TRUE(MachineMemberships().IsUser(0, "root"));
  EXPECT_TRUE(MachineMemberships().IsUser(4711, "4711"));
  EXPECT_TRUE(MachineMemberships().IsIn(0, "root"));
  EXPECT_FALSE(MachineMemberships().IsIn(0, "4711"));
}

}  // namespace
}  // namespace optstate::access
