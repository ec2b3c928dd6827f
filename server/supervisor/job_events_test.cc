#include "server/supervisor/job_events.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "server/observe/event_log.h"

namespace optstate::supervisor {
namespace {

constexpr uid_t kOwner = 4711;
constexpr uid_t kNeighbour = 4712;

std::vector<v1::Event> EventsOf(const char* job) {
  return observe::Events().After(0, job);
}

// A flood of lost ranks leaves the other events of the same user in the log,
// whatever the jobs are called, and those of others.
TEST(JobEventsTest, AFloodOfLostRanksIsCut) {
  JobEvents("first", kOwner).Created();
  for (uint32_t i = 0; i < 10'000; ++i) {
    JobEvents(i % 2 == 0 ? "a" : "b", kOwner).RankLost(i, 5, "it ended");
  }
  // 64, and one for each 10 s that this took.
  const size_t told = EventsOf("a").size() + EventsOf("b").size();
  EXPECT_GE(told, 64u);
  EXPECT_LT(told, 1000u);
  EXPECT_EQ(EventsOf("first").size(), 1u);
  EXPECT_EQ(EventsOf("a")[0].kind(), "rank_lost");
  EXPECT_EQ(EventsOf("a")[0].text(), "rank 0 lost at step 5: it ended");
  EXPECT_EQ(EventsOf("a")[0].severity(), v1::EVENT_SEVERITY_WARNING);
  JobEvents("neighbour", kNeighbour).RankLost(1, 2, "x");
  EXPECT_EQ(EventsOf("neighbour").size(), 1u);
}

// The engine has left some out before, of which the supervisor knows by it
// alone.
TEST(JobEventsTest, WhatTheEngineLeftOutIsSaid) {
  constexpr uid_t kAnother = 4713;
  JobEvents("large", kAnother).RankLost(1, 2, "it ended", 3);
  ASSERT_EQ(EventsOf("large").size(), 1u);
  EXPECT_EQ(EventsOf("large")[0].text(),
            "rank 1 lost at step 2: it ended; 3 losses of ranks of this user's "
            "jobs were left out before");
  // Nothing is left to be told.
  JobEvents::TellLossesLeftOut();
  EXPECT_EQ(EventsOf("large").size(), 1u);
}

TEST(JobEventsTest, SleepHasBytesAndSeconds) {
  const JobEvents events("sleeper", kOwner);
  events.Asleep("/disk/jobs/sleeper", 5, 10, absl::Milliseconds(1250));
  events.NotPutToSleep(absl::AbortedError("why"), 3, absl::Seconds(2));
  events.Awake(5, 10, absl::Seconds(1));
  events.NotWoken(absl::DataLossError("why"), 4, absl::Seconds(3));
  const std::vector<v1::Event> found = EventsOf("sleeper");
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0].kind(), "job_asleep");
  EXPECT_EQ(found[0].text(),
            "asleep in /disk/jobs/sleeper: 5 bytes there, 10 bytes of memory "
            "given back, in 1.25 s");
  EXPECT_EQ(found[1].kind(), "job_sleep_failed");
  EXPECT_EQ(found[1].text(),
            "not put to sleep, after 3 bytes and 2.00 s: ABORTED: why");
  EXPECT_EQ(found[2].kind(), "job_awake");
  EXPECT_EQ(found[2].text(),
            "awake: 5 bytes read back, 10 bytes of memory taken again, in 1.00 "
            "s");
  EXPECT_EQ(found[3].kind(), "job_wake_failed");
  EXPECT_EQ(found[3].text(),
            "not woken, after 4 bytes and 3.00 s: DATA_LOSS: why");
}

}  // namespace
}  // namespace optstate::supervisor
