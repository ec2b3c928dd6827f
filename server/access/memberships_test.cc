#include "server/access/memberships.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace optstate::access {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Tables that count how often they are read, and a clock that the test moves.
class MembershipsTest : public testing::Test {
 protected:
  Memberships Make() {
    return Memberships(
        [this](uid_t uid) -> absl::StatusOr<std::vector<gid_t>> {
          ++lookups_;
          if (!failure_.ok()) return failure_;
          return std::vector<gid_t>{uid, uid + extra_};
        },
        [this] { return now_; });
  }

  int lookups_ = 0;
  gid_t extra_ = 1;
  absl::Status failure_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(MembershipsTest, AnAnswerCountsForAMinute) {
  Memberships memberships = Make();
  EXPECT_THAT(*memberships.GroupsOf(10), ElementsAre(10u, 11u));
  extra_ = 2;
  now_ += Memberships::kLifetime - absl::Seconds(1);
  EXPECT_THAT(*memberships.GroupsOf(10), ElementsAre(10u, 11u));
  EXPECT_EQ(lookups_, 1);
  now_ += absl::Seconds(1);
  EXPECT_THAT(*memberships.GroupsOf(10), ElementsAre(10u, 12u));
  EXPECT_EQ(lookups_, 2);
}

TEST_F(MembershipsTest, TheLastAnswerOutlivesTheTables) {
  Memberships memberships = Make();
  EXPECT_TRUE(memberships.GroupsOf(10).ok());
  failure_ = absl::UnavailableError("the directory server is gone");
  now_ += 2 * Memberships::kLifetime;
  EXPECT_THAT(*memberships.GroupsOf(10), ElementsAre(10u, 11u));
  EXPECT_EQ(lookups_, 2);
  // Requests that follow do not wait for the tables.
  EXPECT_TRUE(memberships.GroupsOf(10).ok());
  EXPECT_EQ(lookups_, 2);
  const absl::Status unknown = memberships.GroupsOf(11).status();
  EXPECT_TRUE(absl::IsUnavailable(unknown)) << unknown;
  EXPECT_THAT(std::string(unknown.message()),
              testing::AllOf(HasSubstr("uid 11"), HasSubstr("server is gone")));
}

TEST_F(MembershipsTest, NoMoreThanSoManyAreRemembered) {
  Memberships memberships = Make();
  for (uid_t uid = 0; uid <= Memberships::kUsersMax; ++uid) {
    now_ += absl::Nanoseconds(1);
    EXPECT_TRUE(memberships.GroupsOf(uid).ok());
  }
  lookups_ = 0;
  EXPECT_TRUE(memberships.GroupsOf(1).ok());
  EXPECT_EQ(lookups_, 0);
  // The oldest was pushed out.
  EXPECT_TRUE(memberships.GroupsOf(0).ok());
  EXPECT_EQ(lookups_, 1);
}

}  // namespace
}  // namespace optstate::access
