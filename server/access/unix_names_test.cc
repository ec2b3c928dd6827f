#include "server/access/unix_names.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <pwd.h>

#include <algorithm>
#include <string>
#include <vector>

namespace optstate::access {
namespace {

TEST(UnixNamesTest, NamesAndNumbers) {
  EXPECT_EQ(*FindUser("root"), 0u);
  EXPECT_EQ(*FindUser("4711"), 4711u);
  EXPECT_EQ(*FindGroup("root"), 0u);
  EXPECT_EQ(*FindGroup("4711"), 4711u);
  for (const char* text : {"", "no such name", "-1", "4294967295"}) {
    EXPECT_TRUE(absl::IsNotFound(FindUser(text).status())) << text;
    EXPECT_TRUE(absl::IsNotFound(FindGroup(text).status())) << text;
  }
}

TEST(UnixNamesTest, AUserHasANameAndItsGroups) {
  EXPECT_EQ(NameOfUser(0), "root");
  const auto groups = FindGroupsOf(0);
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_TRUE(std::is_sorted(groups->begin(), groups->end()));
  EXPECT_TRUE(std::binary_search(groups->begin(), groups->end(), 0u));
}

TEST(UnixNamesTest, ANumberWithoutANameIsInNoGroup) {
  constexpr uid_t kStranger = 2'000'004'711;
  if (!NameOfUser(kStranger).empty()) GTEST_SKIP() << "it has a name here";
  const auto groups = FindGroupsOf(kStranger);
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_TRUE(groups->empty());
}

TEST(UnixNamesTest, GroupsOfAUserAreTheOnesOfTheTables) {
  ::setpwent();
  int users = 0;
  while (const passwd* const entry = ::getpwent()) {
    const auto groups = FindGroupsOf(entry->pw_uid);
    ASSERT_TRUE(groups.ok()) << groups.status();
    // The tables tell the first of several users with one number.
    if (std::binary_search(groups->begin(), groups->end(), entry->pw_gid)) {
      ++users;
    }
  }
  ::endpwent();
  EXPECT_GT(users, 0);
}

// A user whom the table of groups names.
TEST(UnixNamesTest, FurtherGroupsOfAUserCount) {
  std::string user;
  gid_t gid = 0;
  ::setgrent();
  while (const group* const entry = ::getgrent()) {
    if (entry->gr_mem[0] == nullptr) continue;
    user = entry->gr_mem[0];
    gid = entry->gr_gid;
    break;
  }
  ::endgrent();
  if (user.empty() || !FindUser(user).ok()) {
    GTEST_SKIP() << "no group of this machine names a member";
  }
  const auto groups = FindGroupsOf(*FindUser(user));
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_TRUE(std::binary_search(groups->begin(), groups->end(), gid))
      << user << " " << gid;
}

}  // namespace
}  // namespace optstate::access
