#include "server/access/quotas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace optstate::access {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Users who are certainly neither root nor the one of this test. The first two
// are in group 7000, as operators are, the second one in 7001 too.
constexpr uid_t kAda = 4711;
constexpr uid_t kBob = 4712;
constexpr uid_t kEve = 4713;

class QuotasTest : public testing::Test {
 protected:
  QuotasTest() {
    limits_.set_jobs_max(100);
    limits_.set_sessions_max(1000);
    limits_.set_user_sessions_max(30);
    limits_.set_user_state_bytes_max(1 << 20);
  }

  v1::Quota& Add(const std::string& user, const std::string& group = "") {
    v1::Quota& quota = *config_.add_quotas();
    quota.set_user(user);
    quota.set_group(group);
    return quota;
  }

  Quotas Make() {
    return Quotas(limits_, config_.quotas(),
                  [this](uid_t uid) -> absl::StatusOr<std::vector<gid_t>> {
                    ++lookups_;
                    if (!failure_.ok()) return failure_;
                    if (IsOperator(uid)) return std::vector<gid_t>{0, 7000};
                    if (uid == kAda) return std::vector<gid_t>{100, 7000};
                    if (uid == kBob) return std::vector<gid_t>{7000, 7001};
                    return std::vector<gid_t>{100};
                  });
  }

  static std::vector<gid_t> Gids(const std::vector<GroupQuota>& groups) {
    std::vector<gid_t> gids;
    for (const GroupQuota& each : groups) gids.push_back(each.gid);
    return gids;
  }

  v1::Limits limits_;
  v1::DaemonConfig config_;
  absl::Status failure_;
  int lookups_ = 0;
};

TEST_F(QuotasTest, WithoutAQuotaTheLimitsOfAllUsersAreInForce) {
  Quotas quotas = Make();
  const auto bounds = quotas.BoundsOf(kEve);
  ASSERT_TRUE(bounds.ok()) << bounds.status();
  EXPECT_EQ(bounds->own.ByteSizeLong(), 0u);
  EXPECT_EQ(bounds->in_force.jobs_max(), 50u);
  EXPECT_EQ(bounds->in_force.sessions_max(), 30u);
  EXPECT_EQ(bounds->in_force.state_bytes_max(), 1u << 20);
  EXPECT_EQ(bounds->in_force.frames_bytes_max(), 0u);
  EXPECT_THAT(bounds->groups, IsEmpty());
  EXPECT_EQ(quotas.WeightOf(kEve), 100u);
  // There is no quota of a group: nobody's groups matter.
  EXPECT_EQ(lookups_, 0);
}

TEST_F(QuotasTest, AUsersQuotaTakesThePlaceOfTheLimitsItNames) {
  v1::Quota& quota = Add(absl::StrCat(kAda));
  quota.set_jobs_max(3);
  quota.set_disk_bytes_max(5);
  quota.set_weight(400);
  Quotas quotas = Make();
  const auto bounds = quotas.BoundsOf(kAda);
  ASSERT_TRUE(bounds.ok()) << bounds.status();
  EXPECT_EQ(bounds->in_force.jobs_max(), 3u);
  EXPECT_EQ(bounds->in_force.sessions_max(), 30u);
  EXPECT_EQ(bounds->in_force.disk_bytes_max(), 5u);
  EXPECT_EQ(bounds->own.sessions_max(), 0u);
  EXPECT_EQ(quotas.WeightOf(kAda), 400u);
  EXPECT_EQ(quotas.WeightOf(kBob), 100u);
  EXPECT_EQ(quotas.LargestWeight(), 400u);
  EXPECT_EQ(quotas.OfUsers()->size(), 1u);
}

TEST_F(QuotasTest, AGroupsWeightIsThatOfMembersWithoutTheirOwn) {
  Add(absl::StrCat(kAda)).set_weight(50);
  Add("", "7000").set_weight(300);
  Add("", "7001").set_weight(700);
  Add("", "7002").set_weight(900);
  Quotas quotas = Make();
  EXPECT_EQ(quotas.WeightOf(kAda), 50u);
  EXPECT_EQ(quotas.WeightOf(kBob), 700u);  // in both groups
  EXPECT_EQ(quotas.WeightOf(kEve), 100u);
  EXPECT_EQ(quotas.WeightOf(0), 100u);
  EXPECT_EQ(quotas.LargestWeight(), 900u);
  failure_ = absl::UnavailableError("no tables");
  Quotas without = Make();
  EXPECT_EQ(without.WeightOf(kBob), 100u);
}

TEST_F(QuotasTest, TheGroupsOfAUserAreThoseItIsIn) {
  Add("", "7000").set_jobs_max(5);
  Add("", "7001");
  Add("", "7002");
  Quotas quotas = Make();
  EXPECT_THAT(Gids(quotas.BoundsOf(kAda)->groups), ElementsAre(7000u));
  EXPECT_EQ(quotas.BoundsOf(kAda)->groups[0].quota.jobs_max(), 5u);
  EXPECT_THAT(Gids(*quotas.GroupsOf(kBob)), ElementsAre(7000u, 7001u));
  EXPECT_THAT(Gids(*quotas.GroupsOf(kEve)), IsEmpty());
  EXPECT_THAT(Gids(*quotas.OfGroups()), ElementsAre(7000u, 7001u, 7002u));
}

TEST_F(QuotasTest, MembersAreAddedUp) {
  Add("", "7000");
  Add("", "7001");
  Quotas quotas = Make();
  const auto groups = quotas.GroupsOf(kBob);
  ASSERT_TRUE(groups.ok()) << groups.status();
  const std::map<uid_t, uint64_t> by_user = {
      {0, 1000}, {kAda, 1}, {kBob, 10}, {kEve, 100}, {::geteuid(), 1000}};
  EXPECT_THAT(*quotas.SumOverMembers(*groups, by_user), ElementsAre(11u, 10u));
}

TEST_F(QuotasTest, NoneConcernsRootAndTheDaemonsUser) {
  Add("", "7000").set_jobs_max(1);
  Quotas quotas = Make();
  for (const uid_t uid : {uid_t{0}, ::geteuid()}) {
    const auto bounds = quotas.BoundsOf(uid);
    ASSERT_TRUE(bounds.ok()) << bounds.status();
    EXPECT_EQ(bounds->in_force.jobs_max(), 0u);
    EXPECT_THAT(bounds->groups, IsEmpty());
  }
}

TEST_F(QuotasTest, TheOnesThatMayConcernAUser) {
  Add(absl::StrCat(kAda)).set_jobs_max(1);
  Add(absl::StrCat(kBob)).set_jobs_max(2);
  Add("", "7000").set_jobs_max(3);
  // An engine may find the name, as it looks later.
  Add("no such user").set_jobs_max(4);
  const Quotas quotas = Make();
  const Quotas::All found = quotas.ThatMayConcern(kAda);
  ASSERT_EQ(found.size(), 3);
  EXPECT_EQ(found[0].jobs_max(), 1u);
  EXPECT_EQ(found[1].jobs_max(), 3u);
  EXPECT_EQ(found[2].jobs_max(), 4u);
  EXPECT_EQ(lookups_, 0);
  ASSERT_EQ(quotas.ThatMayConcern(kEve).size(), 2);
}

TEST_F(QuotasTest, ANameThatIsGoneConcernsNobody) {
  Add("no such user").set_jobs_max(1);
  Add("", "no such group").set_jobs_max(1);
  Add(absl::StrCat(kAda)).set_jobs_max(2);
  Quotas quotas = Make();
  EXPECT_EQ(quotas.BoundsOf(kAda)->in_force.jobs_max(), 2u);
  EXPECT_EQ(quotas.BoundsOf(kBob)->in_force.jobs_max(), 50u);
  EXPECT_THAT(*quotas.OfGroups(), IsEmpty());
}

TEST_F(QuotasTest, TablesThatCannotBeReadAreSaid) {
  Add("", "7000");
  failure_ = absl::InternalError("the directory server is gone");
  Quotas quotas = Make();
  const absl::Status status = quotas.BoundsOf(kAda).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("server is gone"));
}

TEST(QuotaTextTest, NamesTheHolderAndTheLimit) {
  v1::Quota quota;
  quota.set_group("research");
  EXPECT_EQ(QuotaText(quota, "jobs_max", 10),
            "quota of group research: jobs_max is 10");
  quota.clear_group();
  quota.set_user("ada");
  EXPECT_EQ(QuotaText(quota, "state_bytes_max", 4096),
            "quota of user ada: state_bytes_max is 4096");
}

}  // namespace
}  // namespace optstate::access
