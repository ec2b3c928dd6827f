#include "client/ctl/top_view.h"

#include <string>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
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

std::string Render(const TopSample* before, const TopSample& now) {
  const auto text = RenderTop(before, now, /*wide=*/true);
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

TEST(TopViewTest, WithoutJobsThereIsTheDaemon) {
  TopSample now = Sample(0, 10);
  now.jobs.clear_jobs();
  now.status.set_draining(true);
  EXPECT_THAT(Render(nullptr, now),
              AllOf(HasSubstr("DRAINING"), Not(HasSubstr("STEPS/S"))));
}

}  // namespace
}  // namespace optstate::ctl
