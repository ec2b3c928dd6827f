// Verification of a job's records through the Admin service.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/admin/admin_service_fixture.h"
#include "server/admin/call_timer.h"

namespace optstate::admin {
namespace {

using ::testing::HasSubstr;

class AdminVerifyTest : public AdminServiceTest {
 protected:
  absl::Status Verify(const std::string& job, uid_t uid = ::geteuid()) {
    seen_.clear();
    return service_->VerifyJob(job, access::UnixCaller(uid), /*call=*/nullptr,
                               [this](const v1::VerifyJobProgress& progress) {
                                 seen_.push_back(progress);
                                 return true;
                               });
  }

  std::vector<v1::VerifyJobProgress> seen_;
};

TEST_F(AdminVerifyTest, WhatTheEngineTellsIsPassedOn) {
  AddJob("a", 1);
  const absl::Status status = Verify("a");
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_EQ(seen_.size(), 2u);
  ASSERT_EQ(seen_[0].damages_size(), 1);
  EXPECT_EQ(seen_[0].damages(0).file(), "records of a");
  EXPECT_TRUE(seen_[1].done());
}

TEST_F(AdminVerifyTest, NameAndUserAreChecked) {
  AddJob("a", 1);
  EXPECT_TRUE(absl::IsInvalidArgument(Verify("../a")));
  EXPECT_TRUE(absl::IsNotFound(Verify("b")));
  control_.jobs["a"].uid = 4711;
  EXPECT_TRUE(Verify("a", 4711).ok());
  EXPECT_TRUE(Verify("a", 0).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(Verify("a", 4712)));
  EXPECT_TRUE(seen_.empty());
}

TEST_F(AdminVerifyTest, AnEngineThatDiesMeanwhileIsNamed) {
  AddJob("a", 1, /*hangs=*/false, /*dies=*/true);
  const absl::Status status = Verify("a");
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("engine of job \"a\""));
  EXPECT_EQ(seen_.size(), 1u);
  engines_.Lose("a");
  EXPECT_TRUE(absl::IsUnavailable(Verify("a")));
}

TEST_F(AdminVerifyTest, ACallerThatDoesNotListenEndsIt) {
  FakeEngineService& engine = AddJob("a", 1, /*hangs=*/true);
  int messages = 0;
  const absl::Status status = service_->VerifyJob(
      "a", access::UnixCaller(::geteuid()), /*call=*/nullptr,
      [&messages](const v1::VerifyJobProgress&) { return ++messages < 3; });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(messages, 3);
  engine.AwaitVerificationCancelled();
}

TEST_F(AdminVerifyTest, ItMayLast) {
  const CallTimer timer({});
  EXPECT_EQ(timer.LimitOf("/optstate.v1.Admin/VerifyJob"),
            absl::InfiniteDuration());
  EXPECT_LT(timer.LimitOf("/optstate.v1.Admin/DeleteJob"), absl::Hours(1));
  EXPECT_EQ(timer.LimitOf("/optstate.v1.Admin/DeleteJobWatched"),
            absl::InfiniteDuration());
}

}  // namespace
}  // namespace optstate::admin
