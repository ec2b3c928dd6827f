#include "client/ctl/top_view.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "client/ctl/terminal_fit.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A daemon with one job on disk, `s` seconds after the beginning.
TopSample Sample(int s, uint64_t step) {
  TopSample sample;
  sample.at = absl::FromUnixSeconds(1'000'000'000 + s);
  sample.status.set_version("1.2.3");
  sample.status.set_host("node-7");
  sample.status.set_job_count(1);
  sample.status.set_session_count(2);
  sample.status.set_state_bytes(uint64_t{3} << 30);
  v1::Job* job = sample.jobs.add_jobs();
  job->set_name("gpt");
  job->set_phase(v1::JOB_PHASE_READY);
  job->set_committed_step(step);
  job->set_world_size(2);
  job->set_session_count(2);
  job->set_engine_pid(4711);
  job->mutable_created_at()->set_seconds(5);
  job->mutable_mean_step_times()->set_update_ns(12'340'000);
  job->mutable_mean_step_times()->set_memory_share(0.87);
  job->mutable_disk()->set_bytes_read(step << 30);
  return sample;
}

std::string Render(const TopSample* before, const TopSample& now,
                   const TerminalSize& terminal = {}) {
  const auto text = RenderTop(before, now, /*wide=*/true, terminal);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.value_or("");
}

TEST(TopViewTest, RatesAreOfTheTimeBetweenTwoSamples) {
  const TopSample before = Sample(0, 10);
  const TopSample now = Sample(4, 20);
  EXPECT_THAT(
      Render(&before, now),
      AllOf(HasSubstr("optstated 1.2.3 on node-7, 2001-09-09T01:46:44"),
            HasSubstr("1 jobs, 2 ranks; state 3.0 GiB used, ? left"),
            ContainsRegex("gpt +ready +20 +2[.]50 +2/2 "), HasSubstr(" 12.3 "),
            HasSubstr(" 87% "), HasSubstr(" 2.5 GiB/s ")));
}

TEST(TopViewTest, TheFirstSampleHasNoRates) {
  EXPECT_THAT(Render(nullptr, Sample(0, 10)),
              AllOf(ContainsRegex("gpt +ready +10 +[?] +2/2 "),
                    Not(HasSubstr("GiB/s"))));
}

TEST(TopViewTest, AJobThatWasMadeAnewHasNoRates) {
  const TopSample before = Sample(0, 10);
  TopSample now = Sample(4, 3);
  EXPECT_THAT(Render(&before, now), ContainsRegex("gpt +ready +3 +[?] "));
  now = Sample(4, 20);
  now.jobs.mutable_jobs(0)->mutable_created_at()->set_seconds(6);
  EXPECT_THAT(Render(&before, now), ContainsRegex("gpt +ready +20 +[?] "));
}

TEST(TopViewTest, ADiskRateIsOfOneEngine) {
  const TopSample before = Sample(0, 10);
  TopSample now = Sample(4, 20);
  now.jobs.mutable_jobs(0)->set_engine_pid(4712);
  EXPECT_THAT(Render(&before, now),
              AllOf(HasSubstr(" 2.50 "), Not(HasSubstr("GiB/s"))));
}

TEST(TopViewTest, WhatAnEngineDoesNotSayIsUnknown) {
  const TopSample before = Sample(0, 10);
  TopSample now = Sample(4, 20);
  now.jobs.mutable_jobs(0)->set_ranks_unknown(true);
  EXPECT_THAT(Render(&before, now),
              AllOf(ContainsRegex("gpt +ready +20 +[?] +[?]/2 "),
                    Not(HasSubstr("12.3")), Not(HasSubstr("GiB/s"))));
}

// Adds a job of two ranks, of which so many are attached.
v1::Job* AddJob(TopSample* sample, const char* name, v1::JobPhase phase,
                uint32_t ranks, uint64_t state_bytes) {
  v1::Job* job = sample->jobs.add_jobs();
  job->set_name(name);
  job->set_phase(phase);
  job->set_world_size(2);
  job->set_session_count(ranks);
  job->set_state_bytes(state_bytes);
  return job;
}

// Returns a daemon whose jobs are in no order.
TopSample ManyJobs() {
  TopSample sample = Sample(0, 10);
  sample.jobs.clear_jobs();
  AddJob(&sample, "asleep", v1::JOB_PHASE_ASLEEP, 0, 900);
  AddJob(&sample, "small", v1::JOB_PHASE_READY, 2, 1);
  AddJob(&sample, "b", v1::JOB_PHASE_READY, 2, 70);
  AddJob(&sample, "a", v1::JOB_PHASE_LOADING, 2, 70);
  AddJob(&sample, "half", v1::JOB_PHASE_READY, 1, 5);
  // The phase does not count.
  AddJob(&sample, "silent", v1::JOB_PHASE_FAILED, 0, 6)
      ->set_ranks_unknown(true);
  AddJob(&sample, "recovering", v1::JOB_PHASE_RECOVERING, 0, 8);
  AddJob(&sample, "unknown", v1::JOB_PHASE_UNSPECIFIED, 0, 7)
      ->set_state_unknown(true);
  AddJob(&sample, "failed", v1::JOB_PHASE_FAILED, 0, 2);
  return sample;
}

// Returns the first word of each line below the titles.
std::vector<std::string> Rows(const std::string& text) {
  std::vector<std::string> rows;
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (size_t i = 4; i + 1 < lines.size(); ++i) {
    const std::vector<std::string> words = absl::StrSplit(
        absl::StripLeadingAsciiWhitespace(lines[i]), absl::MaxSplits(' ', 1));
    rows.push_back(words[0]);
  }
  return rows;
}

TEST(TopViewTest, TheMostUrgentJobsComeFirst) {
  EXPECT_THAT(Rows(Render(nullptr, ManyJobs())),
              ElementsAre("failed", "recovering", "unknown", "silent", "half",
                          "a", "b", "small", "asleep"));
}

TEST(TopViewTest, JobsThatHaveNoRoomAreCounted) {
  const TopSample now = ManyJobs();
  const std::string all = Render(nullptr, now);
  EXPECT_EQ(Render(nullptr, now, {.rows = 14}), all);
  const std::string most = Render(nullptr, now, {.rows = 13});
  EXPECT_THAT(Rows(most), ElementsAre("failed", "recovering", "unknown",
                                      "silent", "half", "a", "b", "and"));
  EXPECT_THAT(most, testing::EndsWith("\nand 2 more jobs (optctl get jobs)\n"));
  const std::string narrow = Render(nullptr, now, {.rows = 8, .columns = 20});
  EXPECT_THAT(Rows(narrow), ElementsAre("failed", "recovering", "and"));
  EXPECT_THAT(narrow, testing::StartsWith("optstated 1.2.3 on n\n1 jobs, "));
  EXPECT_THAT(narrow, testing::EndsWith("\nand 7 more jobs (opt\n"));
}

TEST(TopViewTest, WithoutJobsThereIsTheDaemon) {
  TopSample now = Sample(0, 10);
  now.jobs.clear_jobs();
  now.status.set_draining(true);
  EXPECT_THAT(Render(nullptr, now),
              AllOf(HasSubstr("DRAINING"), Not(HasSubstr("STEPS/S"))));
}

}  // namespace
}  // namespace optstate::ctl
