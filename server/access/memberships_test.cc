#include "server/access/memberships.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace optstate::access {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Tables that count how often they are read, and a clock that the test moves.
class MembershipsTest : public testing::Test {
 protected:
  MembershipsTest()
      : memberships_(
            {.find_user =
                 [this](const std::string& name) -> absl::StatusOr<uid_t> {
               ++questions_;
               if (!failure_.ok()) return failure_;
               const auto found = users_.find(name);
               if (found != users_.end()) return found->second;
               return absl::NotFoundError(name);
             },
             .find_group =
                 [this](const std::string& name) -> absl::StatusOr<gid_t> {
               ++questions_;
               if (!failure_.ok()) return failure_;
               const auto found = groups_.find(name);
               if (found != groups_.end()) return found->second;
               return absl::NotFoundError(name);
             },
             .groups_of =
                 [this](uid_t uid) -> absl::StatusOr<std::vector<gid_t>> {
               ++questions_;
               now_ += takes_;
               if (!failure_.ok()) return failure_;
               std::vector<gid_t> answer = groups_of_[uid];
               const auto meanwhile = std::exchange(meanwhile_, nullptr);
               if (meanwhile != nullptr) meanwhile();
               return answer;
             }},
            [this] { return now_; }) {}

  std::map<std::string, uid_t> users_ = {{"alice", 1000}};
  std::map<std::string, gid_t> groups_ = {{"ops", 50}, {"research", 60}};
  std::map<uid_t, std::vector<gid_t>> groups_of_ = {{1000, {50, 1000}}};
  absl::Status failure_;
  // The time that a question for groups takes, and what happens between such an
  // answer and its arrival, once.
  absl::Duration takes_;
  std::function<void()> meanwhile_;
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
  EXPECT_THAT(*memberships_.GroupsOf(1000), ElementsAre(50u, 1000u));
  EXPECT_THAT(*memberships_.GroupsOf(1001), ElementsAre());
}

TEST_F(MembershipsTest, AMemberIsKeptForAWhile) {
  EXPECT_FALSE(memberships_.IsIn(1001, "ops"));
  const int asked = questions_;
  groups_of_[1001] = {50};
  EXPECT_FALSE(memberships_.IsIn(1001, "ops"));
  EXPECT_EQ(questions_, asked);
  now_ += Memberships::kLifetime;
  EXPECT_TRUE(memberships_.IsIn(1001, "ops"));
  // One who was removed from a group is out as late.
  groups_of_[1001].clear();
  now_ += Memberships::kLifetime - absl::Milliseconds(1);
  EXPECT_TRUE(memberships_.IsIn(1001, "ops"));
  now_ += absl::Milliseconds(1);
  EXPECT_FALSE(memberships_.IsIn(1001, "ops"));
}

TEST_F(MembershipsTest, GroupsAreKeptForAWhile) {
  groups_of_[10] = {10, 11};
  EXPECT_THAT(*memberships_.GroupsOf(10), ElementsAre(10u, 11u));
  groups_of_[10] = {10, 12};
  now_ += Memberships::kLifetime - absl::Milliseconds(1);
  EXPECT_THAT(*memberships_.GroupsOf(10), ElementsAre(10u, 11u));
  EXPECT_EQ(questions_, 1);
  now_ += absl::Milliseconds(1);
  EXPECT_THAT(*memberships_.GroupsOf(10), ElementsAre(10u, 12u));
  EXPECT_EQ(questions_, 2);
}

TEST_F(MembershipsTest, WhoCannotBeLookedUpIsNoMember) {
  failure_ = absl::UnavailableError("the directory does not answer");
  EXPECT_FALSE(memberships_.IsIn(1000, "ops"));
  EXPECT_FALSE(memberships_.IsUser(1000, "alice"));
  failure_ = absl::OkStatus();
  now_ += Memberships::kLifetime;
  EXPECT_TRUE(memberships_.IsIn(1000, "ops"));
  EXPECT_TRUE(memberships_.IsUser(1000, "alice"));
}

TEST_F(MembershipsTest, GroupsThatCannotBeLookedUpAreUnavailable) {
  failure_ = absl::InternalError("the directory server is gone");
  const absl::Status unknown = memberships_.GroupsOf(11).status();
  EXPECT_TRUE(absl::IsUnavailable(unknown)) << unknown;
  EXPECT_THAT(std::string(unknown.message()),
              testing::AllOf(HasSubstr("uid 11"), HasSubstr("server is gone")));
  EXPECT_EQ(questions_, 1);
  // Requests that follow do not wait for the tables.
  EXPECT_TRUE(absl::IsUnavailable(memberships_.GroupsOf(11).status()));
  EXPECT_EQ(questions_, 1);
  failure_ = absl::OkStatus();
  now_ += Memberships::kLifetime;
  EXPECT_TRUE(memberships_.GroupsOf(11).ok());
}

TEST_F(MembershipsTest, TheLastAnswerOutlivesTheTables) {
  EXPECT_TRUE(memberships_.IsIn(1000, "ops"));
  EXPECT_TRUE(memberships_.IsUser(1000, "alice"));
  EXPECT_FALSE(memberships_.IsUser(1000, "bob"));
  failure_ = absl::UnavailableError("the directory server is gone");
  users_["bob"] = 1000;
  now_ += 2 * Memberships::kLifetime;
  questions_ = 0;
  EXPECT_TRUE(memberships_.IsIn(1000, "ops"));
  EXPECT_TRUE(memberships_.IsUser(1000, "alice"));
  EXPECT_FALSE(memberships_.IsUser(1000, "bob"));
  EXPECT_THAT(*memberships_.GroupsOf(1000), ElementsAre(50u, 1000u));
  EXPECT_EQ(questions_, 4);
  // Requests that follow do not wait for the tables.
  EXPECT_TRUE(memberships_.IsIn(1000, "ops"));
  EXPECT_TRUE(memberships_.GroupsOf(1000).ok());
  EXPECT_EQ(questions_, 4);
  failure_ = absl::OkStatus();
  now_ += Memberships::kLifetime;
  EXPECT_TRUE(memberships_.IsUser(1000, "bob"));
}

TEST_F(MembershipsTest, SlowTablesAreAskedNoMoreOftenThanOthers) {
  takes_ = 2 * Memberships::kLifetime;
  EXPECT_TRUE(memberships_.GroupsOf(1000).ok());
  EXPECT_TRUE(memberships_.GroupsOf(1000).ok());
  EXPECT_EQ(questions_, 1);
  // Nor are those that hang until an error.
  failure_ = absl::UnavailableError("the directory server is gone");
  now_ += Memberships::kLifetime;
  EXPECT_TRUE(memberships_.GroupsOf(1000).ok());
  EXPECT_TRUE(memberships_.GroupsOf(1000).ok());
  EXPECT_EQ(questions_, 2);
  EXPECT_FALSE(memberships_.GroupsOf(1001).ok());
  EXPECT_FALSE(memberships_.GroupsOf(1001).ok());
  EXPECT_EQ(questions_, 3);
}

// The answer that one caller waits for is older than that of another.
TEST_F(MembershipsTest, AnAnswerThatComesLateIsNotTheNewest) {
  takes_ = absl::Seconds(1);
  meanwhile_ = [this] {
    groups_of_[1000].clear();
    EXPECT_FALSE(memberships_.IsIn(1000, "ops"));
  };
  EXPECT_FALSE(memberships_.IsIn(1000, "ops"));
  EXPECT_FALSE(memberships_.IsIn(1000, "ops"));
}

// A name that is gone is an answer, and no failure.
TEST_F(MembershipsTest, ANameThatIsRemovedIsNobodysAnyMore) {
  EXPECT_TRUE(memberships_.IsUser(1000, "alice"));
  EXPECT_TRUE(memberships_.IsIn(1000, "ops"));
  users_.clear();
  groups_.clear();
  now_ += Memberships::kLifetime;
  EXPECT_FALSE(memberships_.IsUser(1000, "alice"));
  EXPECT_FALSE(memberships_.IsIn(1000, "ops"));
}

TEST_F(MembershipsTest, NoMoreThanSoManyAreRemembered) {
  for (uid_t uid = 0; uid <= Memberships::kAnswersMax; ++uid) {
    now_ += absl::Nanoseconds(1);
    EXPECT_TRUE(memberships_.GroupsOf(uid).ok());
  }
  questions_ = 0;
  EXPECT_TRUE(memberships_.GroupsOf(1).ok());
  EXPECT_EQ(questions_, 0);
  // The oldest was pushed out.
  EXPECT_TRUE(memberships_.GroupsOf(0).ok());
  EXPECT_EQ(questions_, 1);
}

TEST_F(MembershipsTest, NoMoreThanSoManyNamesAreRemembered) {
  EXPECT_TRUE(memberships_.IsUser(1000, "alice"));
  for (size_t i = 0; i < Memberships::kAnswersMax; ++i) {
    now_ += absl::Nanoseconds(1);
    EXPECT_FALSE(memberships_.IsUser(1, absl::StrCat("user", i)));
  }
  questions_ = 0;
  EXPECT_FALSE(memberships_.IsUser(1, "user0"));
  EXPECT_EQ(questions_, 0);
  EXPECT_TRUE(memberships_.IsUser(1000, "alice"));
  EXPECT_EQ(questions_, 1);
}

TEST(MachineMembershipsTest, KnowsTheMachine) {
  EXPECT_TRUE(MachineMemberships().IsUser(0, "root"));
  EXPECT_TRUE(MachineMemberships().IsUser(4711, "4711"));
  EXPECT_TRUE(MachineMemberships().IsIn(0, "root"));
  EXPECT_FALSE(MachineMemberships().IsIn(0, "4711"));
}

}  // namespace
}  // namespace optstate::access
