#include "server/supervisor/permissions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "server/access/member_for_testing.h"

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using access::Caller;
using access::Role;
using access::UnixCaller;
using access::Via;

// Users that this test certainly does not run as.
constexpr uid_t kOwner = 4711;
constexpr uid_t kOther = 4712;

Caller TlsCaller(uid_t uid, Role role) {
  return {.uid = uid, .role = role, .via = Via::kTls, .identity = "DNS:peer"};
}

TEST(PermissionsTest, JoinTakesOwnerOrRoot) {
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, {}, UnixCaller(kOwner)).ok());
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, {}, UnixCaller(0)).ok());
  const absl::Status status =
      CheckMayJoinJob("j", kOwner, {}, UnixCaller(kOther));
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("4711"), HasSubstr("4712"), HasSubstr("\"j\"")));
}

TEST(PermissionsTest, ChangeIsAlsoTheOperators) {
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, {}, UnixCaller(kOwner)).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, {}, UnixCaller(0)).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, {}, UnixCaller(::geteuid())).ok());
  EXPECT_TRUE(
      CheckMayChangeJob("j", kOwner, {}, UnixCaller(kOther, Role::kOperator))
          .ok());
  const absl::Status status =
      CheckMayChangeJob("j", kOwner, {}, UnixCaller(kOther));
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  // Using another name does not help to delete this job.
  EXPECT_THAT(status.message(), HasSubstr("only its owner"));
  EXPECT_THAT(status.message(), Not(HasSubstr("another job name")));
}

TEST(PermissionsTest, OperatorsAreRootTheDaemonUserAndTheirGroups) {
  EXPECT_TRUE(CheckOperator(UnixCaller(0)).ok());
  EXPECT_TRUE(CheckOperator(UnixCaller(::geteuid())).ok());
  EXPECT_TRUE(CheckOperator(UnixCaller(kOther, Role::kOperator)).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(CheckOperator(UnixCaller(kOther))));
}

// Over TLS the role counts, whatever the uid.
TEST(PermissionsTest, OverTlsTheRoleCounts) {
  const Caller viewer = TlsCaller(kOwner, Role::kViewer);
  EXPECT_TRUE(absl::IsPermissionDenied(CheckMayTrain(viewer)));
  EXPECT_TRUE(
      absl::IsPermissionDenied(CheckMayJoinJob("j", kOwner, {}, viewer)));
  EXPECT_TRUE(
      absl::IsPermissionDenied(CheckMayChangeJob("j", kOwner, {}, viewer)));
  const Caller trainer = TlsCaller(kOwner, Role::kTrainer);
  EXPECT_TRUE(CheckMayTrain(trainer).ok());
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, {}, trainer).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, {}, trainer).ok());
  EXPECT_FALSE(CheckMayJoinJob("j", kOther, {}, trainer).ok());
  const Caller root = TlsCaller(0, Role::kTrainer);
  EXPECT_FALSE(CheckMayJoinJob("j", kOwner, {}, root).ok());
  EXPECT_FALSE(CheckMayChangeJob("j", kOwner, {}, root).ok());
  EXPECT_FALSE(CheckOperator(root).ok());
  const Caller of_all = TlsCaller(kOther, Role::kOperator);
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, {}, of_all).ok());
  EXPECT_TRUE(CheckOperator(of_all).ok());
  EXPECT_FALSE(CheckMayJoinJob("j", kOwner, {}, of_all).ok());
}

// A viewer at a unix socket is treated as one over TLS, and one without a role
// as nobody.
TEST(PermissionsTest, AtAUnixSocketTheRoleCountsToo) {
  v1::JobAccess access;
  access.set_is_private(true);
  access.add_readers("4713");
  const Caller viewer = UnixCaller(kOther, Role::kViewer);
  EXPECT_TRUE(MayLook(kOwner, {}, viewer));
  EXPECT_EQ(CheckMayLook("j", kOwner, access, viewer), NoJob("j"));
  for (const uid_t uid : {kOwner, uid_t{4713}}) {
    const Caller named = UnixCaller(uid, Role::kViewer);
    EXPECT_TRUE(MayLook(kOwner, access, named));
    EXPECT_FALSE(CheckMayJoinJob("j", kOwner, access, named).ok());
    EXPECT_FALSE(CheckMayChangeJob("j", kOwner, access, named).ok());
    EXPECT_FALSE(CheckMayChangeAccess("j", kOwner, access, named).ok());
    EXPECT_FALSE(MayLook(kOwner, access, UnixCaller(uid, Role::kNone)));
    EXPECT_FALSE(MayLook(kOwner, {}, UnixCaller(uid, Role::kNone)));
  }
  for (const Role role : {Role::kNone, Role::kViewer}) {
    const absl::Status refused = CheckMayTrain(UnixCaller(kOther, role));
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("takes the role trainer, and uid 4712 has"),
                      HasSubstr("access.trainer_groups")));
  }
  // The daemon's own user and root need no group.
  EXPECT_TRUE(CheckOperator(UnixCaller(0, Role::kNone)).ok());
  EXPECT_TRUE(CheckOperator(UnixCaller(::geteuid(), Role::kViewer)).ok());
}

class GroupPermissionsTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto member = access::FindMemberForTesting();
    if (!member.has_value()) GTEST_SKIP() << "this machine has no other user";
    member_ = UnixCaller(member->uid);
    access_.set_group(member->group);
  }

  Caller member_;
  v1::JobAccess access_;
};

TEST_F(GroupPermissionsTest, MembersMayDoWhatTheOwnerMayButForTheAccess) {
  for (const bool is_private : {false, true}) {
    access_.set_is_private(is_private);
    EXPECT_TRUE(MayLook(kOwner, access_, member_));
    EXPECT_TRUE(CheckMayJoinJob("j", kOwner, access_, member_).ok());
    EXPECT_TRUE(CheckMayChangeJob("j", kOwner, access_, member_).ok());
    const absl::Status refused =
        CheckMayChangeAccess("j", kOwner, access_, member_);
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("only its owner"));
  }
}

TEST_F(GroupPermissionsTest, TheRoleOfAMemberCountsToo) {
  access_.set_is_private(true);
  const Caller viewer = TlsCaller(member_.uid, Role::kViewer);
  EXPECT_TRUE(MayLook(kOwner, access_, viewer));
  EXPECT_FALSE(CheckMayJoinJob("j", kOwner, access_, viewer).ok());
  EXPECT_FALSE(CheckMayChangeJob("j", kOwner, access_, viewer).ok());
  const Caller trainer = TlsCaller(member_.uid, Role::kTrainer);
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, access_, trainer).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, access_, trainer).ok());
  EXPECT_FALSE(MayLook(kOwner, access_, TlsCaller(member_.uid, Role::kNone)));
}

TEST_F(GroupPermissionsTest, AGroupMayBeAReader) {
  v1::JobAccess access;
  access.set_is_private(true);
  EXPECT_FALSE(MayLook(kOwner, access, member_));
  access.add_readers("@" + access_.group());
  EXPECT_TRUE(MayLook(kOwner, access, member_));
  EXPECT_FALSE(CheckMayJoinJob("j", kOwner, access, member_).ok());
  const absl::Status refused = CheckMayChangeJob("j", kOwner, access, member_);
  EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
}

TEST(PermissionsTest, AllMayLookAtAJobThatIsNotPrivate) {
  for (const Caller& caller :
       {UnixCaller(kOther), TlsCaller(kOther, Role::kViewer), UnixCaller(0)}) {
    EXPECT_TRUE(MayLook(kOwner, {}, caller));
    EXPECT_TRUE(CheckMayLook("j", kOwner, {}, caller).ok());
  }
  EXPECT_FALSE(MayLook(kOwner, {}, Caller{}));
}

// For others there is no such job: the words are those for any other name.
TEST(PermissionsTest, APrivateJobIsNotThereForOthers) {
  v1::JobAccess access;
  access.set_is_private(true);
  access.add_readers("4713");
  EXPECT_TRUE(MayLook(kOwner, access, UnixCaller(kOwner)));
  EXPECT_TRUE(MayLook(kOwner, access, TlsCaller(kOwner, Role::kViewer)));
  EXPECT_TRUE(MayLook(kOwner, access, UnixCaller(4713)));
  EXPECT_TRUE(MayLook(kOwner, access, UnixCaller(0)));
  EXPECT_TRUE(MayLook(kOwner, access, TlsCaller(kOther, Role::kOperator)));
  for (const Caller& caller :
       {UnixCaller(kOther), TlsCaller(kOther, Role::kTrainer)}) {
    EXPECT_FALSE(MayLook(kOwner, access, caller));
    EXPECT_EQ(CheckMayLook("j", kOwner, access, caller), NoJob("j"));
    EXPECT_EQ(CheckMayChangeJob("j", kOwner, access, caller), NoJob("j"));
    EXPECT_EQ(CheckMayChangeAccess("j", kOwner, access, caller), NoJob("j"));
    // A caller who wants the name learns that it is taken, and no more.
    const absl::Status taken = CheckMayJoinJob("j", kOwner, access, caller);
    EXPECT_TRUE(absl::IsPermissionDenied(taken)) << taken;
    EXPECT_THAT(std::string(taken.message()),
                AllOf(HasSubstr("\"j\" is taken"), Not(HasSubstr("4711"))));
  }
}

// Readers may look, and no more.
TEST(PermissionsTest, ReadersOnlyLook) {
  v1::JobAccess access;
  access.set_is_private(true);
  access.add_readers("4713");
  const Caller reader = UnixCaller(4713);
  EXPECT_TRUE(CheckMayLook("j", kOwner, access, reader).ok());
  for (const absl::Status& refused :
       {CheckMayJoinJob("j", kOwner, access, reader),
        CheckMayChangeJob("j", kOwner, access, reader),
        CheckMayChangeAccess("j", kOwner, access, reader)}) {
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("4711"));
  }
}

TEST(PermissionsTest, TheAccessIsTheOwnersAndTheOperators) {
  EXPECT_TRUE(CheckMayChangeAccess("j", kOwner, {}, UnixCaller(kOwner)).ok());
  EXPECT_TRUE(CheckMayChangeAccess("j", kOwner, {}, UnixCaller(0)).ok());
  EXPECT_TRUE(
      CheckMayChangeAccess("j", kOwner, {}, TlsCaller(kOther, Role::kOperator))
          .ok());
  EXPECT_FALSE(CheckMayChangeAccess("j", kOwner, {}, UnixCaller(kOther)).ok());
  EXPECT_FALSE(
      CheckMayChangeAccess("j", kOwner, {}, TlsCaller(kOwner, Role::kViewer))
          .ok());
}

TEST(PermissionsTest, NobodyMayDoNothing) {
  EXPECT_FALSE(CheckMayTrain(Caller{}).ok());
  EXPECT_FALSE(CheckMayJoinJob("j", Caller::kNobody, {}, Caller{}).ok());
  EXPECT_FALSE(CheckMayChangeJob("j", Caller::kNobody, {}, Caller{}).ok());
  EXPECT_FALSE(CheckOperator(Caller{}).ok());
}

}  // namespace
}  // namespace optstate::supervisor
