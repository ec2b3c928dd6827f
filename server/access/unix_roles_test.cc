#include "server/access/unix_roles.h"

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/unique_fd.h"

namespace optstate::access {
namespace {

using ::testing::StartsWith;

// A group that no process here is in: the number means "no group".
constexpr gid_t kNoGroup = ~gid_t{0};

// Returns the groups of this process.
std::vector<gid_t> OwnGroups() {
  std::vector<gid_t> groups(static_cast<size_t>(::getgroups(0, nullptr)));
  EXPECT_EQ(::getgroups(static_cast<int>(groups.size()), groups.data()),
            static_cast<int>(groups.size()));
  return groups;
}

UnixRoles Find(const v1::AccessSettings& access) {
  const absl::StatusOr<UnixRoles> roles = UnixRoles::Find(access);
  EXPECT_TRUE(roles.ok()) << roles.status();
  return roles.value_or(UnixRoles());
}

v1::AccessSettings WithOperators(gid_t group) {
  v1::AccessSettings access;
  access.add_operator_groups(std::to_string(group));
  return access;
}

TEST(UnixRolesTest, WithoutSettingsEveryUserIsATrainer) {
  EXPECT_EQ(UnixRoles().Of({}), Role::kTrainer);
  EXPECT_EQ(UnixRoles().Of({0, 4711}), Role::kTrainer);
  EXPECT_EQ(Find({}).Of({4711}), Role::kTrainer);
}

TEST(UnixRolesTest, GroupsOfOperatorsTakeNothingFromOthers) {
  const UnixRoles roles = Find(WithOperators(1));
  EXPECT_EQ(roles.Of({}), Role::kTrainer);
  EXPECT_EQ(roles.Of({2}), Role::kTrainer);
  EXPECT_EQ(roles.Of({2, 1}), Role::kOperator);
}

TEST(UnixRolesTest, GroupsOfTrainersLeaveOthersWithoutARole) {
  v1::AccessSettings access = WithOperators(1);
  access.add_trainer_groups("2");
  access.add_trainer_groups("3");
  const UnixRoles roles = Find(access);
  EXPECT_EQ(roles.Of({}), Role::kNone);
  EXPECT_EQ(roles.Of({4}), Role::kNone);
  EXPECT_EQ(roles.Of({4, 3}), Role::kTrainer);
  EXPECT_EQ(roles.Of({2}), Role::kTrainer);
  EXPECT_EQ(roles.Of({1}), Role::kOperator);
}

TEST(UnixRolesTest, GroupsOfViewersAloneLeaveNoTrainers) {
  v1::AccessSettings access;
  access.add_viewer_groups("3");
  UnixRoles roles = Find(access);
  EXPECT_EQ(roles.Of({}), Role::kNone);
  EXPECT_EQ(roles.Of({3}), Role::kViewer);
  access.add_operator_groups("1");
  roles = Find(access);
  EXPECT_EQ(roles.Of({4}), Role::kNone);
  EXPECT_EQ(roles.Of({3, 1}), Role::kOperator);
}

TEST(UnixRolesTest, TheHighestRoleOfItsGroupsIsTheUsers) {
  v1::AccessSettings access = WithOperators(1);
  access.add_trainer_groups("2");
  access.add_viewer_groups("3");
  // A group may be in several settings.
  access.add_viewer_groups("2");
  access.add_viewer_groups("1");
  const UnixRoles roles = Find(access);
  EXPECT_EQ(roles.Of({3}), Role::kViewer);
  EXPECT_EQ(roles.Of({2}), Role::kTrainer);
  EXPECT_EQ(roles.Of({2, 3}), Role::kTrainer);
  EXPECT_EQ(roles.Of({3, 2}), Role::kTrainer);
  EXPECT_EQ(roles.Of({3, 1, 2}), Role::kOperator);
  EXPECT_EQ(roles.Of({1}), Role::kOperator);
}

TEST(UnixRolesTest, GroupsAreNamesOrNumbersOfThisMachine) {
  v1::AccessSettings good;
  good.add_trainer_groups("root");
  good.add_viewer_groups("4711");
  EXPECT_EQ(Find(good).Of({0}), Role::kTrainer);
  EXPECT_EQ(Find(good).Of({4711}), Role::kViewer);
  for (const std::string name : {"operator", "trainer", "viewer"}) {
    for (const char* bad : {"no such group", ""}) {
      v1::AccessSettings access = good;
      if (name == "operator") access.add_operator_groups(bad);
      if (name == "trainer") access.add_trainer_groups(bad);
      if (name == "viewer") access.add_viewer_groups(bad);
      const absl::Status refused = UnixRoles::Find(access).status();
      EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
      EXPECT_THAT(std::string(refused.message()),
                  StartsWith("access." + name + "_groups: "));
    }
  }
}

class OfPeerTest : public testing::Test {
 protected:
  OfPeerTest() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    a_.reset(fds[0]);
    b_.reset(fds[1]);
  }

  UniqueFd a_;
  UniqueFd b_;
};

TEST_F(OfPeerTest, TheOwnGroupCounts) {
  v1::AccessSettings access = WithOperators(17);
  access.add_operator_groups("4711");
  EXPECT_EQ(Find(access).OfPeer(a_.get(), 4711), Role::kOperator);
  EXPECT_EQ(UnixRoles().OfPeer(a_.get(), 4711), Role::kTrainer);
}

// The kernel has noted the groups of this process, which made the pair.
TEST_F(OfPeerTest, FurtherGroupsCount) {
  const std::vector<gid_t> groups = OwnGroups();
  for (const gid_t group : groups) {
    EXPECT_EQ(Find(WithOperators(group)).OfPeer(a_.get(), kNoGroup),
              Role::kOperator)
        << group;
  }
  gid_t stranger = 4711;
  while (std::find(groups.begin(), groups.end(), stranger) != groups.end()) {
    ++stranger;
  }
  v1::AccessSettings access;
  access.add_trainer_groups(std::to_string(stranger));
  EXPECT_EQ(Find(access).OfPeer(a_.get(), kNoGroup), Role::kNone);
}

// A socket that is none has no peer, and such a peer no groups.
TEST_F(OfPeerTest, GroupsThatCannotBeReadGiveNoRole) {
  v1::AccessSettings access;
  access.add_trainer_groups("4711");
  EXPECT_EQ(Find(access).OfPeer(/*socket=*/-1, kNoGroup), Role::kNone);
  EXPECT_EQ(Find(access).OfPeer(/*socket=*/-1, 4711), Role::kTrainer);
}

// More of them than are asked for at first.
TEST(OfPeerOfManyGroupsTest, AllGroupsCount) {
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
  EXPECT_EQ(Find(WithOperators(10'299)).OfPeer(a.get(), kNoGroup),
            Role::kOperator);
  EXPECT_EQ(Find(WithOperators(10'300)).OfPeer(a.get(), kNoGroup),
            Role::kTrainer);
}

}  // namespace
}  // namespace optstate::access
