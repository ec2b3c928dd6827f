#include "server/metrics/shown_jobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace optstate::metrics {
namespace {

using ::testing::ElementsAre;

v1::Job* Add(const std::string& name, v1::JobPhase phase,
             v1::NodeReport* report) {
  v1::Job* const job = report->add_jobs();
  job->set_name(name);
  job->set_phase(phase);
  return job;
}

// Adds `count` idle jobs, which come before all others by name.
void AddIdle(int count, v1::NodeReport* report) {
  for (int i = 0; i < count; ++i) {
    Add(absl::StrCat("a", 1000 + i), v1::JOB_PHASE_READY, report);
  }
}

std::set<std::string> NamesOf(const v1::NodeReport& report) {
  std::set<std::string> names;
  for (const int i : ShownJobs(report)) names.insert(report.jobs(i).name());
  return names;
}

TEST(ShownJobsTest, AllAreShownThatThereIsRoomFor) {
  v1::NodeReport report;
  EXPECT_THAT(ShownJobs(report), ElementsAre());
  AddIdle(kJobsMax, &report);
  EXPECT_EQ(NamesOf(report).size(), size_t{kJobsMax});
}

TEST(ShownJobsTest, JobsWithoutANameTakeNoRoom) {
  v1::NodeReport report;
  Add("", v1::JOB_PHASE_FAILED, &report);
  AddIdle(kJobsMax, &report);
  Add("", v1::JOB_PHASE_READY, &report);
  const std::vector<int> shown = ShownJobs(report);
  ASSERT_EQ(shown.size(), size_t{kJobsMax});
  EXPECT_EQ(shown.front(), 1);
  EXPECT_EQ(shown.back(), kJobsMax);
}

TEST(ShownJobsTest, TheOrderOfTheReportIsKept) {
  v1::NodeReport report;
  AddIdle(kJobsMax, &report);
  Add("z", v1::JOB_PHASE_FAILED, &report);
  const std::vector<int> shown = ShownJobs(report);
  ASSERT_EQ(shown.size(), size_t{kJobsMax});
  EXPECT_TRUE(std::is_sorted(shown.begin(), shown.end()));
  EXPECT_EQ(shown.front(), 0);
  EXPECT_EQ(shown.back(), kJobsMax);
}

TEST(ShownJobsTest, WhatNeedsAttentionIsShownWhateverItsName) {
  v1::NodeReport report;
  AddIdle(kJobsMax, &report);
  Add("z-failed", v1::JOB_PHASE_FAILED, &report);
  Add("z-hangs", v1::JOB_PHASE_READY, &report)->set_ranks_unknown(true);
  Add("z-unknown", v1::JOB_PHASE_UNSPECIFIED, &report);
  Add("z-recovering", v1::JOB_PHASE_RECOVERING, &report);
  Add("z-trains", v1::JOB_PHASE_READY, &report)->set_session_count(1);
  Add("z-asleep", v1::JOB_PHASE_ASLEEP, &report);
  const std::set<std::string> names = NamesOf(report);
  EXPECT_EQ(names.size(), size_t{kJobsMax});
  for (const char* name :
       {"z-failed", "z-hangs", "z-unknown", "z-recovering", "z-trains"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_FALSE(names.contains("z-asleep"));
  // The last ones by name make room.
  EXPECT_TRUE(names.contains(absl::StrCat("a", 1000 + kJobsMax - 6)));
  EXPECT_FALSE(names.contains(absl::StrCat("a", 1000 + kJobsMax - 5)));
}

// Each kind, when there are too many of it, leaves no room for the next.
TEST(ShownJobsTest, TheMostUrgentComeFirst) {
  v1::NodeReport report;
  const auto add_many = [&report](const std::string& prefix, v1::JobPhase phase,
                                  uint32_t sessions) {
    for (int i = 0; i < 100; ++i) {
      Add(absl::StrCat(prefix, 100 + i), phase, &report)
          ->set_session_count(sessions);
    }
  };
  add_many("a-trains", v1::JOB_PHASE_READY, 2);
  add_many("b-recovers", v1::JOB_PHASE_RECOVERING, 0);
  add_many("c-unknown", v1::JOB_PHASE_UNSPECIFIED, 0);
  add_many("d-failed", v1::JOB_PHASE_FAILED, 2);
  const std::set<std::string> names = NamesOf(report);
  EXPECT_TRUE(names.contains("d-failed199"));
  EXPECT_TRUE(names.contains("c-unknown199"));
  EXPECT_TRUE(names.contains("b-recovers155"));
  EXPECT_FALSE(names.contains("b-recovers156"));
  EXPECT_FALSE(names.contains("a-trains100"));
}

TEST(ShownJobsTest, NamesDecideInWhateverOrderTheReportHasThem) {
  v1::NodeReport report;
  for (int i = kJobsMax; i >= 0; --i) {
    Add(absl::StrCat("a", 1000 + i), v1::JOB_PHASE_READY, &report);
  }
  const std::vector<int> shown = ShownJobs(report);
  ASSERT_EQ(shown.size(), size_t{kJobsMax});
  EXPECT_EQ(shown.front(), 1);  // the one left out is a1256, the first
}

}  // namespace
}  // namespace optstate::metrics
