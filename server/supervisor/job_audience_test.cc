#include "server/supervisor/job_audience.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "optstate/v1/admin.pb.h"
#include "server/access/caller.h"

namespace optstate::supervisor {
namespace {

using access::Caller;
using access::Role;
using access::UnixCaller;

// Users that this test certainly does not run as.
constexpr uid_t kOwner = 4711;
constexpr uid_t kReader = 4712;
constexpr uid_t kOther = 4713;

v1::Event EventOf(const std::string& job, uint64_t sequence) {
  v1::Event event;
  event.set_job(job);
  event.set_sequence(sequence);
  event.set_owner_uid(kOwner);
  return event;
}

v1::Event AuditOf(const std::string& job, const std::string& actor) {
  v1::Event event;
  event.set_job(job);
  event.set_sequence(50);
  event.set_actor(actor);
  return event;
}

v1::JobAccess Private() {
  v1::JobAccess access;
  access.set_is_private(true);
  access.add_readers("4712");
  return access;
}

class JobAudienceTest : public testing::Test {
 protected:
  bool OtherSees(const v1::Event& event) const {
    const bool is_public = audience_.IsPublic(event);
    EXPECT_EQ(audience_.MaySee(event, UnixCaller(kOther)), is_public);
    return is_public;
  }
  // Users who may look at the private job.
  void ExpectForReaders(const v1::Event& event) const {
    for (const uid_t uid : {kOwner, kReader, uid_t{0}}) {
      EXPECT_TRUE(audience_.MaySee(event, UnixCaller(uid))) << uid;
    }
    EXPECT_FALSE(OtherSees(event));
  }

  JobAudience audience_;
};

TEST_F(JobAudienceTest, TheNodesEventsAreForAll) {
  EXPECT_TRUE(OtherSees(v1::Event()));
  EXPECT_FALSE(audience_.MaySee(v1::Event(), Caller{}));
}

TEST_F(JobAudienceTest, EventsAreForThoseWhoMayLookAtTheJob) {
  audience_.Begin("open", kOwner, {});
  audience_.Begin("secret", kOwner, Private());
  EXPECT_TRUE(OtherSees(EventOf("open", 1)));
  ExpectForReaders(EventOf("secret", 1));
  audience_.Change("secret", {});
  EXPECT_TRUE(OtherSees(EventOf("secret", 1)));
  audience_.Change("secret", Private());
  ExpectForReaders(EventOf("secret", 2));
}

TEST_F(JobAudienceTest, TheyStaySoWhenTheJobHasEnded) {
  audience_.Begin("open", kOwner, {});
  audience_.Begin("secret", kOwner, Private());
  audience_.End("open");
  audience_.End("secret");
  EXPECT_TRUE(OtherSees(EventOf("open", 1)));
  ExpectForReaders(EventOf("secret", 1));
}

TEST_F(JobAudienceTest, ANameThatIsTakenAgainShowsNothingOfTheFormerJob) {
  audience_.Begin("a", kOwner, Private());
  audience_.End("a");
  audience_.Begin("a", kOther, {}, /*after_sequence=*/10);
  EXPECT_FALSE(OtherSees(EventOf("a", 10)));
  // The next one is the same owner's.
  audience_.End("a");
  audience_.Begin("a", kOwner, {}, /*after_sequence=*/20);
  EXPECT_FALSE(OtherSees(EventOf("a", 20)));
  EXPECT_TRUE(OtherSees(EventOf("a", 21)));
  // Both have ended: the log does not tell which event was whose.
  audience_.End("a");
  EXPECT_FALSE(OtherSees(EventOf("a", 21)));
  EXPECT_TRUE(audience_.MaySee(EventOf("a", 21), UnixCaller(kOwner)));
}

// As after an upgrade, when the log is older than this object.
TEST_F(JobAudienceTest, AJobThatIsNotKnownIsItsOwners) {
  EXPECT_FALSE(OtherSees(EventOf("gone", 1)));
  EXPECT_TRUE(audience_.MaySee(EventOf("gone", 1), UnixCaller(kOwner)));
  EXPECT_TRUE(audience_.MaySee(EventOf("gone", 1), UnixCaller(0)));
}

// A caller who asks for a hidden job sees what it would see of a name that no
// job has.
TEST_F(JobAudienceTest, AnAuditDoesNotTellWhetherThereIsAJob) {
  audience_.Begin("secret", kOwner, Private());
  audience_.Begin("open", kOwner, {});
  const std::string actor = UnixCaller(kOther).name();
  for (const char* job : {"secret", "absent"}) {
    EXPECT_TRUE(audience_.MaySee(AuditOf(job, actor), UnixCaller(kOther)));
    EXPECT_FALSE(audience_.MaySee(AuditOf(job, actor), UnixCaller(4799)));
    EXPECT_FALSE(audience_.IsPublic(AuditOf(job, actor)));
    EXPECT_TRUE(audience_.MaySee(AuditOf(job, actor), UnixCaller(0)));
  }
  EXPECT_TRUE(audience_.MaySee(AuditOf("secret", actor), UnixCaller(kReader)));
  EXPECT_TRUE(audience_.IsPublic(AuditOf("open", actor)));
  // The user called nobody owns nothing by that.
  EXPECT_FALSE(
      audience_.MaySee(AuditOf("absent", actor), UnixCaller(Caller::kNobody)));
}

TEST_F(JobAudienceTest, JobsThatHaveEndedAreBounded) {
  for (size_t i = 0; i <= JobAudience::kEndedMax; ++i) {
    audience_.Begin(std::to_string(i), kOwner, {});
    audience_.End(std::to_string(i));
  }
  EXPECT_FALSE(OtherSees(EventOf("0", 1)));
  EXPECT_TRUE(OtherSees(EventOf("1", 1)));
}

}  // namespace
}  // namespace optstate::supervisor
