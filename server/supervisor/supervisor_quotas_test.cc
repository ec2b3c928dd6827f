// Quotas of jobs and sessions, with a real supervisor and users who are not
// the one of this test.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/access/colleagues.h"
#include "server/access/unix_names.h"
#include "server/supervisor/supervisor_fixture.h"
#include "server/supervisor/supervisor_harness.h"

namespace optstate::supervisor {
namespace {

using ::testing::HasSubstr;
using Harness = SupervisorHarness;

constexpr uid_t kAda = 4711;
constexpr uid_t kBob = 4712;

class SupervisorQuotasTest : public SupervisorTest {
 protected:
  v1::Quota& AddQuota(uid_t user) {
    v1::Quota& quota = *harness_.config().add_quotas();
    quota.set_user(absl::StrCat(user));
    return quota;
  }
  v1::Quota& AddGroupQuota(gid_t group) {
    v1::Quota& quota = *harness_.config().add_quotas();
    quota.set_group(absl::StrCat(group));
    return quota;
  }
  TestSession MustOpenAs(uid_t uid, const std::string& job) {
    auto session = harness_.OpenAs(uid, job);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : TestSession();
  }
  void ExpectRefused(uid_t uid, const std::string& job,
                     const std::string& why) {
    const absl::Status status = harness_.OpenAs(uid, job).status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
};

TEST_F(SupervisorQuotasTest, AUserHasItsOwnNumberOfJobs) {
  AddQuota(kAda).set_jobs_max(2);
  harness_.config().mutable_limits()->set_user_jobs_max(1);
  harness_.Start();
  const TestSession a = MustOpenAs(kAda, "a");
  const TestSession b = MustOpenAs(kAda, "b");
  ExpectRefused(kAda, "c", "quota of user 4711: jobs_max is 2");
  // It may attach to the jobs that it has.
  const TestSession again = MustOpenAs(kAda, "b");
  // Others have what all users have.
  const TestSession d = MustOpenAs(kBob, "d");
  ExpectRefused(kBob, "e", "(limits.user_jobs_max)");
  // The user of this test is the daemon's.
  MustOpen("f");
  MustOpen("g");
}

TEST_F(SupervisorQuotasTest, AUserHasItsOwnNumberOfSessions) {
  AddQuota(kAda).set_sessions_max(2);
  harness_.Start();
  const TestSession first = MustOpenAs(kAda, "a");
  TestSession second = MustOpenAs(kAda, "a");
  ExpectRefused(kAda, "a", "quota of user 4711: sessions_max is 2");
  MustOpenAs(kBob, "b");
  second.fd.reset();
  // The engine sees the end of the session in its own time.
  EXPECT_TRUE(
      Harness::Eventually([this] { return harness_.OpenAs(kAda, "a").ok(); }));
}

TEST_F(SupervisorQuotasTest, TheMembersOfAGroupHaveJobsAndSessionsTogether) {
  const std::optional<access::Colleagues> found = access::FindColleagues();
  if (!found.has_value()) {
    GTEST_SKIP() << "this machine has no two users in one group";
  }
  const auto [group, ada, bob] = *found;
  v1::Quota& quota = AddGroupQuota(group);
  quota.set_jobs_max(2);
  quota.set_sessions_max(3);
  harness_.Start();
  const TestSession a = MustOpenAs(ada, "a");
  const TestSession b = MustOpenAs(bob, "b");
  const std::string name = absl::StrCat("quota of group ", group, ": ");
  for (const uid_t uid : {ada, bob}) {
    ExpectRefused(uid, "c", absl::StrCat(name, "jobs_max is 2"));
  }
  const TestSession more = MustOpenAs(bob, "b");
  for (const uid_t uid : {ada, bob}) {
    ExpectRefused(uid, uid == ada ? "a" : "b",
                  absl::StrCat(name, "sessions_max is 3"));
  }
  // A number without a name is in no group.
  if (access::NameOfUser(kAda).empty()) MustOpenAs(kAda, "d");
}

TEST_F(SupervisorQuotasTest, JobsOfAFormerDaemonCount) {
  AddQuota(kAda).set_jobs_max(1);
  harness_.Start();
  const TestSession before = MustOpenAs(kAda, "a");
  harness_.Abandon();
  harness_.Start();
  ExpectRefused(kAda, "b", "jobs_max is 1");
  MustOpenAs(kAda, "a");
}

}  // namespace
}  // namespace optstate::supervisor
