#include "server/access/job_access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/access/member_for_testing.h"

namespace optstate::access {
namespace {

using ::testing::HasSubstr;

// A user that the tables certainly lack.
constexpr uid_t kStranger = 47110815;

TEST(JobAccessTest, AnythingEmptyIsPossible) {
  EXPECT_TRUE(CheckJobAccess({}, kStranger).ok());
  EXPECT_EQ(AccessText({}), "not private");
}

TEST(JobAccessTest, RootMayNameAnyGroupThatIsThere) {
  v1::JobAccess access;
  access.set_group("4711");
  EXPECT_TRUE(CheckJobAccess(access, 0).ok());
  access.set_group("no such group");
  const absl::Status status = CheckJobAccess(access, 0);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no such group"));
}

TEST(JobAccessTest, OthersNameTheirOwnGroups) {
  v1::JobAccess access;
  access.set_group("root");
  const absl::Status status = CheckJobAccess(access, kStranger);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("uid ", kStranger, ", is not in")));
  const auto member = FindMemberForTesting();
  if (!member.has_value()) GTEST_SKIP() << "this machine has no other user";
  access.set_group(member->group);
  EXPECT_TRUE(CheckJobAccess(access, member->uid).ok()) << member->uid;
}

TEST(JobAccessTest, ReadersExist) {
  v1::JobAccess access;
  access.set_is_private(true);
  access.add_readers("root");
  access.add_readers("@root");
  access.add_readers("4711");
  access.add_readers("@4711");
  EXPECT_TRUE(CheckJobAccess(access, kStranger).ok());
  EXPECT_EQ(AccessText(access), "private; readers root, @root, 4711, @4711");
  for (const std::string name : {"no such user", "@no such group"}) {
    v1::JobAccess with = access;
    with.add_readers(name);
    const absl::Status status = CheckJobAccess(with, kStranger);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no such"));
  }
}

TEST(JobAccessTest, TheSameIsTheSameInAllParts) {
  v1::JobAccess one;
  one.set_is_private(true);
  one.set_group("root");
  one.add_readers("root");
  EXPECT_TRUE(IsSameAccess(one, one));
  v1::JobAccess other = one;
  other.set_is_private(false);
  EXPECT_FALSE(IsSameAccess(one, other));
  other = one;
  other.clear_group();
  EXPECT_FALSE(IsSameAccess(one, other));
  other = one;
  other.set_readers(0, "@root");
  EXPECT_FALSE(IsSameAccess(one, other));
  other = one;
  other.add_readers("root");
  EXPECT_FALSE(IsSameAccess(one, other));
  EXPECT_FALSE(IsSameAccess(other, one));
}

TEST(JobAccessTest, TheFormIsCheckedFirst) {
  v1::JobAccess access;
  access.add_readers("root");
  EXPECT_TRUE(absl::IsInvalidArgument(CheckJobAccess(access, 0)));
  access.Clear();
  access.set_group("a:b");
  EXPECT_TRUE(absl::IsInvalidArgument(CheckJobAccess(access, 0)));
}

}  // namespace
}  // namespace optstate::access
