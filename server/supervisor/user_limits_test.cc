#include "server/supervisor/user_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace optstate::supervisor {
namespace {

using ::testing::HasSubstr;

const accept::PeerCredentials kUser = {.caller = access::UnixCaller(4711)};
const accept::PeerCredentials kRoot = {.caller = access::UnixCaller(0)};

v1::Limits Limits() {
  v1::Limits limits;
  limits.set_jobs_max(100);
  limits.set_sessions_max(1000);
  limits.set_operator_reserve_percent(12);
  return limits;
}

void ExpectRefused(const absl::Status& status, const char* limit) {
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(limit));
}

TEST(UserLimitsTest, AUserHasHalfByDefault) {
  EXPECT_TRUE(CheckJobCount(Limits(), kUser, {49, 49}).ok());
  ExpectRefused(CheckJobCount(Limits(), kUser, {50, 50}),
                "(limits.user_jobs_max)");
  EXPECT_TRUE(CheckSessionCount(Limits(), kUser, {499, 499}).ok());
  ExpectRefused(CheckSessionCount(Limits(), kUser, {500, 500}),
                "(limits.user_sessions_max)");
}

TEST(UserLimitsTest, OrWhatIsConfigured) {
  v1::Limits limits = Limits();
  limits.set_user_jobs_max(3);
  EXPECT_TRUE(CheckJobCount(limits, kUser, {2, 2}).ok());
  ExpectRefused(CheckJobCount(limits, kUser, {3, 3}), "uid 4711 already has 3");
}

TEST(UserLimitsTest, UsersTogetherLeaveThePartOfOperators) {
  EXPECT_TRUE(CheckJobCount(Limits(), kUser, {0, 87}).ok());
  ExpectRefused(CheckJobCount(Limits(), kUser, {0, 88}),
                "limits.operator_reserve_percent");
  for (const accept::PeerCredentials& peer :
       {kRoot,
        accept::PeerCredentials{.caller = access::UnixCaller(::geteuid())}}) {
    EXPECT_TRUE(CheckJobCount(Limits(), peer, {99, 99}).ok());
    ExpectRefused(CheckJobCount(Limits(), peer, {100, 100}),
                  "(limits.jobs_max)");
  }
}

// The bytes of their jobs are bounded as those of all users are.
TEST(UserLimitsTest, OtherOperatorsAreBoundedAsAllUsersAre) {
  const accept::PeerCredentials in_group = {
      .caller = access::UnixCaller(4711, access::Role::kOperator)};
  EXPECT_TRUE(in_group.is_operator());
  EXPECT_FALSE(HasNoQuota(in_group));
  ExpectRefused(CheckJobCount(Limits(), in_group, {50, 50}),
                "(limits.user_jobs_max)");
  ExpectRefused(CheckSessionCount(Limits(), in_group, {0, 880}),
                "limits.operator_reserve_percent");
}

// A peer over TCP has the daemon's uid, though its user is unknown.
TEST(UserLimitsTest, TcpIsNoOperator) {
  ExpectRefused(
      CheckJobCount(Limits(), {.caller = access::InsecureTcpCaller()}, {0, 88}),
      "limits.operator_reserve_percent");
}

TEST(UserLimitsTest, NothingIsKeptOfOne) {
  v1::Limits limits = Limits();
  limits.set_jobs_max(1);
  EXPECT_TRUE(CheckJobCount(limits, kUser, {0, 0}).ok());
  limits.set_jobs_max(2);
  EXPECT_TRUE(CheckJobCount(limits, kUser, {0, 0}).ok());
  ExpectRefused(CheckJobCount(limits, kUser, {0, 1}), "operator_reserve");
  limits.set_operator_reserve_percent(0);
  EXPECT_TRUE(CheckJobCount(limits, kUser, {0, 1}).ok());
}

class QuotaLimitsTest : public testing::Test {
 protected:
  QuotaLimitsTest() {
    bounds_.uid = 4711;
    bounds_.own.set_user("ada");
    bounds_.own.set_jobs_max(3);
    access::GroupQuota research = {7000, {}};
    research.quota.set_group("research");
    research.quota.set_jobs_max(10);
    research.quota.set_sessions_max(20);
    access::GroupQuota all = {7001, {}};
    all.quota.set_group("all");
    bounds_.groups = {research, all};
  }

  access::UserBounds bounds_;
};

TEST_F(QuotaLimitsTest, AUsersQuotaTakesThePlaceOfTheLimitOfAllUsers) {
  v1::Limits limits = Limits();
  limits.set_user_jobs_max(2);
  EXPECT_TRUE(CheckJobCount(limits, kUser, {2, 2, {2, 2}}, bounds_).ok());
  ExpectRefused(CheckJobCount(limits, kUser, {3, 3, {3, 3}}, bounds_),
                "quota of user ada: jobs_max is 3, and uid 4711 already has 3 "
                "jobs");
  // It says nothing about sessions.
  limits.set_user_sessions_max(2);
  ExpectRefused(CheckSessionCount(limits, kUser, {2, 2, {2, 2}}, bounds_),
                "(limits.user_sessions_max)");
}

TEST_F(QuotaLimitsTest, TheMembersOfAGroupAreCountedTogether) {
  EXPECT_TRUE(CheckJobCount(Limits(), kUser, {0, 9, {9, 9}}, bounds_).ok());
  ExpectRefused(CheckJobCount(Limits(), kUser, {0, 10, {10, 10}}, bounds_),
                "quota of group research: jobs_max is 10, and its members "
                "together already have 10 jobs");
  ExpectRefused(CheckSessionCount(Limits(), kUser, {0, 20, {20, 20}}, bounds_),
                "quota of group research: sessions_max is 20");
}

TEST_F(QuotaLimitsTest, RootMayGoBeyond) {
  EXPECT_TRUE(CheckJobCount(Limits(), kRoot, {50, 50, {50, 50}}, bounds_).ok());
}

}  // namespace
}  // namespace optstate::supervisor
