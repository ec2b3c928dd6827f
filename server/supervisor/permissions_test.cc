#include "server/supervisor/permissions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Users that this test certainly does not run as.
constexpr uid_t kOwner = 4711;
constexpr uid_t kOther = 4712;

TEST(PermissionsTest, JoinTakesOwnerOrRoot) {
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, kOwner).ok());
  EXPECT_TRUE(CheckMayJoinJob("j", kOwner, 0).ok());
  const absl::Status status = CheckMayJoinJob("j", kOwner, kOther);
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("4711"), HasSubstr("4712"), HasSubstr("\"j\"")));
}

TEST(PermissionsTest, ChangeIsAlsoTheDaemonUsers) {
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, kOwner).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, 0).ok());
  EXPECT_TRUE(CheckMayChangeJob("j", kOwner, ::geteuid()).ok());
  const absl::Status status = CheckMayChangeJob("j", kOwner, kOther);
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  // Using another name does not help to delete this job.
  EXPECT_THAT(status.message(), HasSubstr("only its owner"));
  EXPECT_THAT(status.message(), Not(HasSubstr("another job name")));
}

TEST(PermissionsTest, OperatorsAreRootAndTheDaemonUser) {
  EXPECT_TRUE(CheckOperator(0).ok());
  EXPECT_TRUE(CheckOperator(::geteuid()).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(CheckOperator(kOther)));
}

}  // namespace
}  // namespace optstate::supervisor
