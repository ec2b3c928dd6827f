// Callers who take what engines have said a moment ago.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/access/caller.h"
#include "server/admin/admin_service.h"
#include "server/admin/admin_service_fixture.h"
#include "server/admin/fake_engine_service.h"
#include "server/supervisor/permissions.h"

namespace optstate::admin {
namespace {

constexpr absl::Duration kAge = absl::Milliseconds(100);

// A user whom this test certainly does not run as.
const access::Caller kStranger = access::UnixCaller(4713);

class AdminAgeTest : public AdminServiceTest {
 protected:
  AdminAgeTest()
      : aging_(&control_, &engines_, &upgrade_, info_, absl::Hours(1),
               [this] { return Now(); }) {}

  absl::Time Now() {
    const absl::MutexLock lock(&clock_mutex_);
    return now_;
  }
  void Pass(absl::Duration time) {
    const absl::MutexLock lock(&clock_mutex_);
    now_ += time;
  }
  static absl::Time Never() { return absl::InfiniteFuture(); }

  // Returns the step of the job as a caller sees it who takes this age.
  uint64_t StepAt(absl::Duration age_max) {
    const auto job =
        aging_.GetJob("a", Operator(), Never(), /*memory=*/false, age_max);
    EXPECT_TRUE(job.ok()) << job.status();
    return job.ok() ? job->committed_step() : 0;
  }

  absl::Mutex clock_mutex_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  AdminService aging_;
};

TEST_F(AdminAgeTest, AKeptAnswerServesThoseWhoTakeItsAge) {
  FakeEngineService& engine = AddJob("a", 1);
  EXPECT_EQ(StepAt(kAge), 1u);
  Pass(kAge);
  EXPECT_EQ(StepAt(kAge), 1u);
  EXPECT_EQ(engine.asks(), 1);
  Pass(absl::Milliseconds(1));
  EXPECT_EQ(StepAt(kAge), 2u);
}

TEST_F(AdminAgeTest, WhoSaysNothingGetsNothingOld) {
  FakeEngineService& engine = AddJob("a", 1);
  EXPECT_EQ(StepAt(kAge), 1u);
  EXPECT_EQ(StepAt(absl::ZeroDuration()), 2u);
  EXPECT_EQ(aging_.ListJobs(Operator(), Never()).jobs(0).committed_step(), 3u);
  EXPECT_EQ(engine.asks(), 3);
}

// Only for them anything is kept.
TEST_F(AdminAgeTest, NothingIsKeptForThoseWhoSayNothing) {
  AddJob("a", 1);
  EXPECT_EQ(StepAt(absl::ZeroDuration()), 1u);
  EXPECT_EQ(StepAt(kAge), 2u);
}

TEST_F(AdminAgeTest, ListsAndJobsServeEachOther) {
  FakeEngineService& engine = AddJob("a", 3);
  FakeEngineService& other = AddJob("b", 2);
  EXPECT_EQ(StepAt(kAge), 1u);
  EXPECT_EQ(aging_.ListJobs(Operator(), Never(), kAge).jobs_size(), 2);
  EXPECT_EQ(aging_.GetStatus(Operator(), Never(), kAge).session_count(), 5u);
  for (const char* const job : {"", "a"}) {
    const auto sessions = aging_.ListSessions(job, Operator(), Never(), kAge);
    ASSERT_TRUE(sessions.ok()) << sessions.status();
    EXPECT_EQ(sessions->sessions_size(), *job == '\0' ? 5 : 3);
  }
  EXPECT_EQ(engine.asks(), 1);
  EXPECT_EQ(other.asks(), 1);
}

// An answer that is kept has no rights in it.
TEST_F(AdminAgeTest, RightsAreThoseOfTheCall) {
  AddJob("a", 1);
  EXPECT_TRUE(
      aging_.GetJob("a", kStranger, Never(), /*memory=*/false, kAge).ok());
  control_.jobs["a"].access.set_is_private(true);
  EXPECT_EQ(
      aging_.GetJob("a", kStranger, Never(), /*memory=*/false, kAge).status(),
      supervisor::NoJob("a"));
  EXPECT_EQ(aging_.ListJobs(kStranger, Never(), kAge).jobs_size(), 0);
  EXPECT_EQ(aging_.ListSessions("", kStranger, Never(), kAge)->sessions_size(),
            0);
  control_.jobs["a"].access.set_is_private(false);
  EXPECT_EQ(aging_.ListJobs(kStranger, Never(), kAge).jobs_size(), 1);
}

TEST_F(AdminAgeTest, AJobThatHasEndedIsGone) {
  AddJob("a", 1);
  EXPECT_EQ(StepAt(kAge), 1u);
  control_.EndJob("a");
  EXPECT_TRUE(absl::IsNotFound(
      aging_.GetJob("a", Operator(), Never(), /*memory=*/false, kAge)
          .status()));
  EXPECT_EQ(aging_.ListJobs(Operator(), Never(), kAge).jobs_size(), 0);
}

TEST_F(AdminAgeTest, TheNextEngineIsAsked) {
  AddJob("a", 1);
  EXPECT_EQ(StepAt(kAge), 1u);
  FakeEngineService& next = StartEngine("a", 1);
  control_.jobs["a"].engine_pid = 18;
  EXPECT_EQ(StepAt(kAge), 1u);
  EXPECT_EQ(next.asks(), 1);
}

// An engine that gives no answer is asked again by each caller.
TEST_F(AdminAgeTest, NoAnswerIsNotKept) {
  AddJob("a", 1, /*hangs=*/true);
  for (int i = 0; i < 2; ++i) {
    const auto job =
        aging_.GetJob("a", Operator(), Never(), /*memory=*/false, kAge);
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_TRUE(job->ranks_unknown());
  }
  const v1::ListJobsReply list = aging_.ListJobs(Operator(), Never(), kAge);
  EXPECT_EQ(list.unanswered_size(), 1);
}

}  // namespace
}  // namespace optstate::admin
