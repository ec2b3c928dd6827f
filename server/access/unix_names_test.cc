#include "server/access/unix_names.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "proto/types/unique_fd.h"

namespace optstate::access {
namespace {

// Returns the groups of this process.
std::vector<gid_t> OwnGroups() {
  std::vector<gid_t> groups(static_cast<size_t>(::getgroups(0, nullptr)));
  EXPECT_EQ(::getgroups(static_cast<int>(groups.size()), groups.data()),
            static_cast<int>(groups.size()));
  return groups;
}

TEST(UnixNamesTest, NamesAndNumbers) {
  EXPECT_EQ(*FindUser("root"), 0u);
  EXPECT_EQ(*FindUser("4711"), 4711u);
  EXPECT_EQ(*FindGroup("root"), 0u);
  EXPECT_EQ(*FindGroup("4711"), 4711u);
  for (const char* text : {"", "no such name", "-1", "4294967295"}) {
    EXPECT_TRUE(absl::IsNotFound(FindUser(text).status())) << text;
    EXPECT_TRUE(absl::IsNotFound(FindGroup(text).status())) << text;
  }
  v1::AccessSettings access;
  access.add_operator_groups("root");
  access.add_operator_groups("4711");
  EXPECT_EQ(*FindOperatorGroups(access), (std::set<gid_t>{0, 4711}));
  access.add_operator_groups("no such group");
  EXPECT_TRUE(absl::StrContains(FindOperatorGroups(access).status().message(),
                                "access.operator_groups"));
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

class PeerIsInTest : public testing::Test {
 protected:
  PeerIsInTest() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    a_.reset(fds[0]);
    b_.reset(fds[1]);
  }

  UniqueFd a_;
  UniqueFd b_;
};

TEST_F(PeerIsInTest, TheOwnGroupCounts) {
  EXPECT_TRUE(PeerIsIn(a_.get(), 4711, {17, 4711}));
  EXPECT_FALSE(PeerIsIn(a_.get(), 4711, {}));
}

// The kernel has noted the groups of this process, which made the pair.
TEST_F(PeerIsInTest, FurtherGroupsCount) {
  const std::vector<gid_t> groups = OwnGroups();
  for (const gid_t group : groups) {
    EXPECT_TRUE(PeerIsIn(a_.get(), ~gid_t{0}, {group})) << group;
  }
  gid_t stranger = 4711;
  while (std::find(groups.begin(), groups.end(), stranger) != groups.end()) {
    ++stranger;
  }
  EXPECT_FALSE(PeerIsIn(a_.get(), ~gid_t{0}, {stranger}));
}

// More of them than are asked for at first.
TEST(PeerIsInManyTest, AllGroupsCount) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to have many groups";
  const std::vector<gid_t> before = OwnGroups();
  std::vector<gid_t> many;
  for (gid_t group = 10'000; group < 10'300; ++group) many.push_back(group);
  if (::setgroups(many.size(), many.data()) != 0) {
    GTEST_SKIP() << "this user namespace allows no setgroups";
  }
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  const UniqueFd a(fds[0]);
  const UniqueFd b(fds[1]);
  ASSERT_EQ(::setgroups(before.size(), before.data()), 0);
  EXPECT_TRUE(PeerIsIn(a.get(), ~gid_t{0}, {10'299}));
  EXPECT_FALSE(PeerIsIn(a.get(), ~gid_t{0}, {10'300}));
}

}  // namespace
}  // namespace optstate::access
