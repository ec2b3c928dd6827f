// Tests which events the supervisor notes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/observe/event_log.h"
#include "server/supervisor/supervisor_fixture.h"
#include "server/supervisor/supervisor_harness.h"

namespace optstate::supervisor {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class SupervisorEventsTest : public SupervisorTest {
 protected:
  std::vector<v1::Event> EventsOf(const std::string& job) const {
    return observe::Events().After(before_, job);
  }

  std::vector<std::string> KindsOf(const std::string& job) const {
    std::vector<std::string> kinds;
    for (const v1::Event& event : EventsOf(job)) kinds.push_back(event.kind());
    return kinds;
  }

  // Returns the last event of the job; the kinds say which it has to be.
  v1::Event Last(const std::string& job) const {
    const std::vector<v1::Event> events = EventsOf(job);
    return events.empty() ? v1::Event() : events.back();
  }

  bool AwaitKind(const std::string& job, const std::string& kind) const {
    return SupervisorHarness::Eventually(
        [&] { return Last(job).kind() == kind; });
  }

  const std::string user_ = absl::StrCat("uid ", ::geteuid());
  // Events of the tests before this one are not looked at.
  const uint64_t before_ = observe::Events().Await(0, absl::InfinitePast());
};

TEST_F(SupervisorEventsTest, TheLifeOfAJob) {
  harness_.Start();
  const TestSession session = MustOpen("a");
  ASSERT_THAT(KindsOf("a"), ElementsAre("job_created", "engine_started"));
  const v1::Event created = EventsOf("a")[0];
  EXPECT_EQ(created.actor(), user_);
  EXPECT_EQ(created.owner_uid(), ::geteuid());
  EXPECT_EQ(created.severity(), v1::EVENT_SEVERITY_INFO);
  EXPECT_GT(created.at().seconds(), 0);
  EXPECT_EQ(Last("a").text(),
            absl::StrCat("engine ", session.engine_pid, " is ready"));

  ::kill(static_cast<pid_t>(session.engine_pid), SIGKILL);
  ASSERT_TRUE(AwaitKind("a", "engine_started"));
  ASSERT_TRUE(SupervisorHarness::Eventually(
      [this] { return EventsOf("a").size() == 4; }));
  EXPECT_THAT(KindsOf("a"), ElementsAre("job_created", "engine_started",
                                        "engine_died", "engine_started"));
  const v1::Event died = EventsOf("a")[2];
  EXPECT_EQ(died.severity(), v1::EVENT_SEVERITY_ERROR);
  EXPECT_THAT(died.text(), HasSubstr(absl::StrCat("engine ", session.engine_pid,
                                                  " was killed by signal 9")));

  const access::Caller self = access::UnixCaller(::geteuid());
  ASSERT_TRUE(harness_.supervisor().HoldJob("a", self).ok());
  ASSERT_TRUE(
      harness_.supervisor().DeleteHeldJob("a", absl::InfiniteFuture()).ok());
  EXPECT_EQ(Last("a").kind(), "job_deleted");
  EXPECT_EQ(Last("a").actor(), user_);
}

TEST_F(SupervisorEventsTest, AJobThatEndsByItself) {
  harness_.Start();
  MustOpen("one-session").fd.reset();
  ASSERT_TRUE(AwaitKind("one-session", "job_deleted"));
  EXPECT_THAT(
      KindsOf("one-session"),
      ElementsAre("job_created", "engine_started", "job_over", "job_deleted"));
  EXPECT_EQ(Last("one-session").actor(), "");
}

TEST_F(SupervisorEventsTest, AJobThatFailsAndIsRecovered) {
  harness_.config().mutable_engine()->set_restarts_max(0);
  harness_.Start();
  EXPECT_FALSE(harness_.Open("broken").ok());
  ASSERT_THAT(KindsOf("broken"),
              ElementsAre("job_created", "engine_died", "job_failed"));
  EXPECT_THAT(Last("broken").text(), HasSubstr("exited with status 3"));
  EXPECT_EQ(Last("broken").severity(), v1::EVENT_SEVERITY_ERROR);
  ASSERT_TRUE(harness_.supervisor()
                  .RecoverJob("broken", access::UnixCaller(::geteuid()), 0,
                              /*to_durable=*/false)
                  .ok());
  const std::vector<v1::Event> events = EventsOf("broken");
  ASSERT_GE(events.size(), 4u);
  EXPECT_EQ(events[3].kind(), "job_recovering");
  EXPECT_EQ(events[3].actor(), user_);
}

TEST_F(SupervisorEventsTest, AnEngineThatIsFoundRunning) {
  harness_.Start();
  const TestSession session = MustOpen("a");
  harness_.Abandon();
  harness_.Start();
  ASSERT_TRUE(AwaitKind("a", "engine_adopted"));
  EXPECT_EQ(Last("a").text(),
            absl::StrCat("engine ", session.engine_pid,
                         " is ready, and was running before"));
}

TEST_F(SupervisorEventsTest, ARankThatIsLost) {
  harness_.Start();
  MustOpen("loses").fd.reset();
  ASSERT_TRUE(AwaitKind("loses", "rank_lost"));
  EXPECT_EQ(Last("loses").text(), "rank 0 lost at step 7: process 4711 ended");
  EXPECT_EQ(Last("loses").severity(), v1::EVENT_SEVERITY_WARNING);
  EXPECT_EQ(Last("loses").owner_uid(), ::geteuid());
}

TEST_F(SupervisorEventsTest, RanksThatGoWhileTheDaemonDrainsAreNotLost) {
  harness_.Start();
  TestSession session = MustOpen("loses");
  const auto await_kept = [this](size_t count) {
    return SupervisorHarness::Eventually([this, count] {
      const auto found = harness_.Find("loses");
      return found.has_value() && found->kept_count == count;
    });
  };
  ASSERT_TRUE(await_kept(1));
  ASSERT_TRUE(harness_.supervisor().SetDraining(true).ok());
  session.fd.reset();
  // The engine drops the gradients after it has told the loss.
  ASSERT_TRUE(await_kept(0));
  EXPECT_THAT(KindsOf("loses"), Not(Contains("rank_lost")));
}

TEST_F(SupervisorEventsTest, ADrainThatIsOlderThanTheDaemon) {
  // The log of this process may still say that a test before this one drains.
  v1::Event ended;
  ended.set_kind("drain_ended");
  observe::Events().Add(ended);
  harness_.Start();
  ASSERT_TRUE(harness_.supervisor().SetDraining(true).ok());
  harness_.Stop();
  harness_.Start();
  const v1::Event last = Last("");
  EXPECT_EQ(last.kind(), "drain_begun");
  EXPECT_THAT(last.text(), HasSubstr("before this start"));
  // The next start continues the log, as an upgrade does: it has the event.
  harness_.Abandon();
  harness_.Start();
  EXPECT_THAT(KindsOf(""), Contains("drain_begun").Times(1));
}

}  // namespace
}  // namespace optstate::supervisor
