#include "server/supervisor/permissions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

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
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, UnixCaller(kOwner)).ok());
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, UnixCaller(0)).ok());
  const absl::Status status = CheckMayJoinJob("j", kOwner, UnixCaller(kOther));
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("4711"), HasSubstr("4712"), HasSubstr("\"j\"")));
}

TEST(PermissionsTest, ChangeIsAlsoTheOperators) {
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, UnixCaller(kOwner)).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, UnixCaller(0)).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, UnixCaller(::geteuid())).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner,
                                UnixCaller(kOther, /*in_operator_group=*/true))
                  .ok());
  const absl::Status status =
      CheckMayChangeJob("j", kOwner, UnixCaller(kOther));
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  // Using another name does not help to delete this job.
  EXPECT_THAT(status.message(), HasSubstr("only its owner"));
  EXPECT_THAT(status.message(), Not(HasSubstr("another job name")));
}

TEST(PermissionsTest, OperatorsAreRootTheDaemonUserAndTheirGroups) {
  EXPECT_TRUE(CheckOperator(UnixCaller(0)).ok());
  EXPECT_TRUE(CheckOperator(UnixCaller(::geteuid())).ok());
  EXPECT_TRUE(CheckOperator(UnixCaller(kOther, true)).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(CheckOperator(UnixCaller(kOther))));
}

// Over TLS the role counts, whatever the uid.
TEST(PermissionsTest, OverTlsTheRoleCounts) {
  const Caller viewer = TlsCaller(kOwner, Role::kViewer);
  EXPECT_TRUE(absl::IsPermissionDenied(CheckMayTrain(viewer)));
  EXPECT_TRUE(absl::IsPermissionDenied(CheckMayJoinJob("j", kOwner, viewer)));
  EXPECT_TRUE(absl::IsPermissionDenied(CheckMayChangeJob("j", kOwner, viewer)));
  const Caller trainer = TlsCaller(kOwner, Role::kTrainer);
  EXPECT_TRUE(CheckMayTrain(trainer).ok());
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, trainer).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, trainer).ok());
  EXPECT_FALSE(CheckMayJoinJob("j", kOther, trainer).ok());
  const Caller root = TlsCaller(0, Role::kTrainer);
  EXPECT_FALSE(CheckMayJoinJob("j", kOwner, root).ok());
  EXPECT_FALSE(CheckMayChangeJob("j", kOwner, root).ok());
  EXPECT_FALSE(CheckOperator(root).ok());
  const Caller of_all = TlsCaller(kOther, Role::kOperator);
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, of_all).ok());
  EXPECT_TRUE(CheckOperator(of_all).ok());
  EXPECT_FALSE(CheckMayJoinJob("j", kOwner, of_all).ok());
}

TEST(PermissionsTest, NobodyMayDoNothing) {
  EXPECT_FALSE(CheckMayTrain(Caller{}).ok());
  EXPECT_FALSE(CheckMayJoinJob("j", Caller::kNobody, Caller{}).ok());
  EXPECT_FALSE(CheckMayChangeJob("j", Caller::kNobody, Caller{}).ok());
  EXPECT_FALSE(CheckOperator(Caller{}).ok());
}

}  // namespace
}  // namespace optstate::supervisor
