// The call of the Admin service that describes users and quotas.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/access/colleagues.h"
#include "server/access/unix_names.h"
#include "server/admin/admin_service_fixture.h"

namespace optstate::admin {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// Users who are certainly neither root nor the one of this test.
constexpr uid_t kAda = 4711;
constexpr uid_t kBob = 4712;

const access::Caller kOperator = access::UnixCaller(0);

class AdminUsersTest : public AdminServiceTest {
 protected:
  AdminUsersTest() : root_(testing::TempDir() + "/admin-users-XXXXXX") {
    if (::mkdtemp(root_.data()) == nullptr) std::abort();
    info_.config.set_state_dir(root_);
    info_.config.mutable_nvme()->add_directories(root_ + "/disk");
    info_.config.mutable_limits()->set_jobs_max(100);
    info_.config.mutable_limits()->set_sessions_max(1000);
  }
  ~AdminUsersTest() override { fs::remove_all(root_); }

  // Makes the service with the quotas that the test has added.
  void Start() {
    service_ = std::make_unique<AdminService>(&control_, &engines_, &upgrade_,
                                              info_, absl::InfiniteDuration());
  }
  // Makes a job with an engine and so many ranks, and files.
  void MakeJob(const std::string& name, uid_t owner, uint32_t sessions,
               size_t frames = 0, size_t disk = 0) {
    AddJob(name, sessions);
    control_.jobs[name].uid = owner;
    Write(absl::StrCat("/jobs/", name, "/owner"), absl::StrCat(owner, "\n"));
    if (frames != 0) {
      Write(absl::StrCat("/jobs/", name, "/state/frames"),
            std::string(frames, 'x'));
    }
    if (disk != 0) {
      Write(absl::StrCat("/disk/jobs/", name, "/records"),
            std::string(disk, 'x'));
    }
  }
  void Write(const std::string& file, const std::string& text) const {
    fs::create_directories(fs::path(root_ + file).parent_path());
    std::ofstream(root_ + file) << text;
  }
  v1::ListUsersReply List(const access::Caller& caller,
                          const std::string& user = "") {
    v1::ListUsersRequest request;
    request.set_user(user);
    const auto reply = service_->ListUsers(request, caller, Soon());
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? *reply : v1::ListUsersReply();
  }
  absl::Status Refusal(const access::Caller& caller, const std::string& user) {
    v1::ListUsersRequest request;
    request.set_user(user);
    return service_->ListUsers(request, caller, Soon()).status();
  }
  v1::ListUsersReply ListGroup(const access::Caller& caller,
                               const std::string& group) {
    v1::ListUsersRequest request;
    request.set_group(group);
    const auto reply = service_->ListUsers(request, caller, Soon());
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? *reply : v1::ListUsersReply();
  }
  absl::Status GroupRefusal(const access::Caller& caller,
                            const std::string& group) {
    v1::ListUsersRequest request;
    request.set_group(group);
    return service_->ListUsers(request, caller, Soon()).status();
  }

  std::string root_;
};

TEST_F(AdminUsersTest, WhatUsersTakeAndMayTake) {
  MakeJob("a", kAda, 2, 4096, 8192);
  MakeJob("b", kAda, 1, 4096);
  MakeJob("c", kBob, 1);
  v1::Quota& quota = *info_.config.add_quotas();
  quota.set_user(absl::StrCat(kAda));
  quota.set_jobs_max(3);
  quota.set_weight(200);
  info_.config.add_quotas()->set_user("4713");  // who has no job
  Start();
  const v1::ListUsersReply reply = List(kOperator);
  ASSERT_THAT(reply.users(), SizeIs(3));
  const v1::UserUse& ada = reply.users(0);
  EXPECT_EQ(ada.uid(), kAda);
  EXPECT_EQ(ada.use().jobs(), 2u);
  EXPECT_EQ(ada.use().sessions(), 3u);
  EXPECT_EQ(ada.use().frames_bytes(), 8192u);
  EXPECT_GE(ada.use().state_bytes(), 8192u);
  EXPECT_GE(ada.use().disk_bytes(), 8192u);
  EXPECT_EQ(ada.quota().jobs_max(), 3u);
  EXPECT_EQ(ada.quota().sessions_max(), 500u);
  EXPECT_EQ(ada.quota().weight(), 200u);
  EXPECT_FALSE(ada.is_operator());
  EXPECT_EQ(reply.users(1).uid(), kBob);
  EXPECT_EQ(reply.users(1).use().disk_bytes(), 0u);
  EXPECT_EQ(reply.users(1).quota().jobs_max(), 50u);
  EXPECT_EQ(reply.users(1).quota().weight(), 100u);
  EXPECT_EQ(reply.users(2).uid(), 4713u);
  EXPECT_EQ(reply.users(2).use().jobs(), 0u);
  EXPECT_THAT(reply.groups(), SizeIs(0));
  EXPECT_THAT(reply.unanswered(), SizeIs(0));
}

TEST_F(AdminUsersTest, OperatorsHaveNoLimits) {
  MakeJob("a", 0, 1);
  Start();
  const v1::ListUsersReply reply = List(kOperator);
  ASSERT_THAT(reply.users(), SizeIs(1));
  EXPECT_EQ(reply.users(0).user(), "root");
  EXPECT_TRUE(reply.users(0).is_operator());
  EXPECT_EQ(reply.users(0).quota().jobs_max(), 0u);
  EXPECT_EQ(reply.users(0).keys().jobs_max(), "");
}

TEST_F(AdminUsersTest, EachLimitHasAKeyOfTheConfiguration) {
  info_.config.mutable_limits()->set_user_sessions_max(30);
  info_.config.mutable_limits()->set_user_state_bytes_max(1 << 20);
  info_.config.add_quotas()->set_user(absl::StrCat(kBob));
  v1::Quota& quota = *info_.config.add_quotas();
  quota.set_user(absl::StrCat(kAda));
  quota.set_state_bytes_max(1 << 30);
  quota.set_frames_bytes_max(1 << 20);
  quota.set_weight(300);
  v1::Quota& group = *info_.config.add_quotas();
  group.set_group("4714");
  group.set_disk_bytes_max(1 << 30);
  Start();
  const v1::ListUsersReply reply = List(kOperator);
  ASSERT_THAT(reply.users(), SizeIs(2));
  const v1::QuotaKeys& ada = reply.users(0).keys();
  EXPECT_EQ(ada.jobs_max(), "half of limits.jobs_max");
  EXPECT_EQ(ada.sessions_max(), "limits.user_sessions_max");
  EXPECT_EQ(ada.state_bytes_max(), "quotas[1].state_bytes_max");
  EXPECT_EQ(ada.frames_bytes_max(), "quotas[1].frames_bytes_max");
  EXPECT_EQ(ada.disk_bytes_max(), "");
  EXPECT_EQ(ada.weight(), "quotas[1].weight");
  const v1::QuotaKeys& bob = reply.users(1).keys();
  EXPECT_EQ(bob.state_bytes_max(), "limits.user_state_bytes_max");
  EXPECT_EQ(bob.weight(), "");
  ASSERT_THAT(reply.groups(), SizeIs(1));
  EXPECT_EQ(reply.groups(0).keys().disk_bytes_max(),
            "quotas[2].disk_bytes_max");
  EXPECT_EQ(reply.groups(0).keys().jobs_max(), "");
}

// A user's part is that of all whose engines run, however many jobs each has.
TEST_F(AdminUsersTest, UsersHaveAPartByTheirWeights) {
  MakeJob("a", kAda, 1);
  MakeJob("b", kBob, 1);
  MakeJob("c", kBob, 1);
  v1::Quota& ada = *info_.config.add_quotas();
  ada.set_user(absl::StrCat(kAda));
  ada.set_weight(300);
  // One without an engine: the part that it would have.
  v1::Quota& eve = *info_.config.add_quotas();
  eve.set_user("4713");
  eve.set_weight(400);
  Start();
  const v1::ListUsersReply reply = List(kOperator);
  ASSERT_THAT(reply.users(), SizeIs(3));
  EXPECT_DOUBLE_EQ(reply.users(0).part(), 0.75);
  EXPECT_DOUBLE_EQ(reply.users(1).part(), 0.25);
  EXPECT_DOUBLE_EQ(reply.users(2).part(), 0.5);
}

TEST_F(AdminUsersTest, AnOperatorMayAskForItself) {
  MakeJob("a", kAda, 1);
  Start();
  v1::ListUsersRequest request;
  request.set_own(true);
  const auto reply = service_->ListUsers(request, kOperator, Soon());
  ASSERT_TRUE(reply.ok()) << reply.status();
  ASSERT_THAT(reply->users(), SizeIs(1));
  EXPECT_EQ(reply->users(0).uid(), 0u);
  EXPECT_EQ(reply->users(0).use().jobs(), 0u);
  request.set_user("root");
  const absl::Status both =
      service_->ListUsers(request, kOperator, Soon()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(both)) << both;
}

TEST_F(AdminUsersTest, OneGroupIsAskedForByNameOrNumber) {
  AddJob("hanging", 5, /*hangs=*/true);
  control_.jobs["hanging"].uid = kAda;
  for (const char* group : {"4714", "4715"}) {
    v1::Quota& quota = *info_.config.add_quotas();
    quota.set_group(group);
    quota.set_jobs_max(9);
  }
  Start();
  const v1::ListUsersReply reply = ListGroup(kOperator, "4715");
  EXPECT_THAT(reply.users(), SizeIs(0));
  ASSERT_THAT(reply.groups(), SizeIs(1));
  EXPECT_EQ(reply.groups(0).group(), "4715");
  EXPECT_EQ(reply.groups(0).keys().jobs_max(), "quotas[1].jobs_max");
  // A job of a user who is not in it is no part of it.
  EXPECT_THAT(reply.unanswered(), SizeIs(0));
  const absl::Status none = GroupRefusal(kOperator, "4716");
  EXPECT_TRUE(absl::IsNotFound(none)) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("has no quota"));
  for (const char* group : {"4714", "4716", "no such group"}) {
    const absl::Status refused = GroupRefusal(access::UnixCaller(kAda), group);
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
  }
}

TEST_F(AdminUsersTest, SleepingJobsAreCountedAmongTheOthers) {
  MakeJob("a", kAda, 1);
  supervisor::JobSummary& asleep = control_.jobs["asleep"];
  asleep.name = "asleep";
  asleep.uid = kAda;
  asleep.sleep.emplace().set_directory(root_ + "/asleep/jobs/asleep");
  Start();
  const v1::ListUsersReply reply = List(kOperator);
  ASSERT_THAT(reply.users(), SizeIs(1));
  EXPECT_EQ(reply.users(0).use().jobs(), 2u);
  EXPECT_EQ(reply.users(0).use().sleeping_jobs(), 1u);
}

TEST_F(AdminUsersTest, WhoIsNoOperatorSeesItsOwnUser) {
  MakeJob("a", kAda, 1);
  MakeJob("b", kBob, 1);
  Start();
  const access::Caller ada = access::UnixCaller(kAda);
  for (const std::string& user : {std::string(), absl::StrCat(kAda)}) {
    const v1::ListUsersReply reply = List(ada, user);
    ASSERT_THAT(reply.users(), SizeIs(1));
    EXPECT_EQ(reply.users(0).uid(), kAda);
  }
  for (const std::string& user :
       {absl::StrCat(kBob), std::string("root"), std::string("no such user")}) {
    const absl::Status refused = Refusal(ada, user);
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("its own user"));
  }
  // One without a job sees that it has none.
  const v1::ListUsersReply eve = List(access::UnixCaller(4713));
  ASSERT_THAT(eve.users(), SizeIs(1));
  EXPECT_EQ(eve.users(0).use().jobs(), 0u);
}

TEST_F(AdminUsersTest, AnOperatorMayAskForOne) {
  MakeJob("a", kAda, 1);
  MakeJob("b", kBob, 1);
  Start();
  const v1::ListUsersReply reply = List(kOperator, absl::StrCat(kBob));
  ASSERT_THAT(reply.users(), SizeIs(1));
  EXPECT_EQ(reply.users(0).uid(), kBob);
  const absl::Status unknown = Refusal(kOperator, "no such user");
  EXPECT_TRUE(absl::IsNotFound(unknown)) << unknown;
}

TEST_F(AdminUsersTest, AJobWhoseEngineGivesNoAnswerIsNamed) {
  MakeJob("a", kAda, 2);
  AddJob("hanging", 5, /*hangs=*/true);
  control_.jobs["hanging"].uid = kAda;
  MakeJob("b", kBob, 1);
  Start();
  const v1::ListUsersReply reply = List(access::UnixCaller(kAda));
  ASSERT_THAT(reply.users(), SizeIs(1));
  EXPECT_EQ(reply.users(0).use().jobs(), 2u);
  ASSERT_THAT(reply.unanswered(), SizeIs(1));
  EXPECT_EQ(reply.unanswered(0).name(), "hanging");
  EXPECT_THAT(List(access::UnixCaller(kBob)).unanswered(), SizeIs(0));
}

TEST_F(AdminUsersTest, GroupsAreTheSumOfTheirMembers) {
  const auto found = access::FindColleagues();
  if (!found.has_value()) {
    GTEST_SKIP() << "this machine has no two users in one group";
  }
  MakeJob("a", found->first, 2, 4096);
  MakeJob("b", found->second, 3, 8192);
  // Sums have private jobs as well.
  control_.jobs["b"].access.set_is_private(true);
  AddJob("hanging", 5, /*hangs=*/true);
  control_.jobs["hanging"].uid = found->second;
  MakeJob("root", 0, 7, 1 << 20);
  const std::string group = absl::StrCat(found->group);
  v1::Quota& quota = *info_.config.add_quotas();
  quota.set_group(group);
  quota.set_jobs_max(9);
  Start();
  for (const access::Caller& caller :
       {kOperator, access::UnixCaller(found->first)}) {
    const v1::ListUsersReply reply = List(caller);
    ASSERT_THAT(reply.groups(), SizeIs(1));
    EXPECT_EQ(reply.groups(0).group(), group);
    EXPECT_EQ(reply.groups(0).use().jobs(), 3u);
    EXPECT_EQ(reply.groups(0).use().frames_bytes(), 4096u + 8192u);
    EXPECT_EQ(reply.groups(0).quota().jobs_max(), 9u);
    EXPECT_THAT(ListGroup(caller, group).groups(), SizeIs(1));
    // The sum lacks ranks, which is said without another's name.
    ASSERT_THAT(reply.unanswered(), SizeIs(1));
    EXPECT_EQ(reply.unanswered(0).name(),
              caller.role == access::Role::kOperator
                  ? "hanging"
                  : absl::StrCat("a job of uid ", found->second));
  }
  if (!access::NameOfUser(kAda).empty()) return;
  // A user who is in no group sees none.
  EXPECT_THAT(List(access::UnixCaller(kAda)).groups(), SizeIs(0));
}

}  // namespace
}  // namespace optstate::admin
