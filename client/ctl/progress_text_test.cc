#include "client/ctl/progress_text.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "absl/time/time.h"
#include "client/ctl/chrome_trace.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

// Returns a trace with these steps, and as many spans, of which some are lost.
ChromeTrace TraceOf(uint32_t steps, uint64_t lost_spans) {
  ChromeTrace trace("gpt");
  v1::TraceChunk chunk;
  chunk.add_lanes()->set_name("phases");
  for (uint32_t i = 0; i < steps; ++i) chunk.add_spans()->set_name("update");
  chunk.set_steps(steps);
  chunk.set_lost_spans(lost_spans);
  EXPECT_TRUE(trace.Add(chunk).ok());
  return trace;
}

TEST(ProgressTextTest, ATraceThatHasNotBegun) {
  EXPECT_EQ(TraceProgressText("gpt", ChromeTrace("gpt"), 20, absl::Seconds(5)),
            "tracing job gpt: waits for a step");
}

TEST(ProgressTextTest, ATraceHasARateAndATimeLeft) {
  EXPECT_EQ(TraceProgressText("gpt", TraceOf(5, 0), 20, absl::Seconds(2)),
            "tracing job gpt: 5 of 20 steps, 2.5 a second, 6 s left, 5 spans");
  EXPECT_EQ(TraceProgressText("gpt", TraceOf(20, 3), 20, absl::Seconds(10)),
            "tracing job gpt: 20 of 20 steps, 2.0 a second, 0 s left, 20 "
            "spans, 3 lost");
}

TEST(ProgressTextTest, WithoutAStepOrTimeThereIsNoRate) {
  EXPECT_EQ(TraceProgressText("gpt", TraceOf(5, 0), 20, absl::ZeroDuration()),
            "tracing job gpt: 5 of 20 steps, 5 spans");
  v1::ServerStatus status;
  status.set_job_count(3);
  EXPECT_EQ(UpgradeProgressText(status, absl::Seconds(2)),
            "upgrading: 0 of at most 3 engines replaced");
}

TEST(ProgressTextTest, AnUpgradeHasARateAndATimeLeft) {
  v1::ServerStatus status;
  status.set_job_count(12);
  status.mutable_upgrade()->set_engines_replaced(3);
  EXPECT_EQ(UpgradeProgressText(status, absl::Seconds(2)),
            "upgrading: 3 of at most 12 engines replaced, 1.5 a second, at "
            "most 6 s left");
  // A job has ended since its engine was replaced.
  status.set_job_count(2);
  EXPECT_EQ(UpgradeProgressText(status, absl::Seconds(2)),
            "upgrading: 3 of at most 3 engines replaced, 1.5 a second, at most "
            "0 s left");
}

TEST(ProgressTextTest, ADeletionWaitsForTheEngineAndHasARate) {
  v1::DeleteProgress progress;
  progress.set_awaits_engine(true);
  EXPECT_EQ(DeleteProgressText("gpt", progress, absl::ZeroDuration()),
            "deleting job gpt: waits for the end of its engine");
  progress.set_awaits_engine(false);
  EXPECT_EQ(DeleteProgressText("gpt", progress, absl::ZeroDuration()),
            "deleting job gpt");
  progress.set_bytes_total(uint64_t{8} << 30);
  EXPECT_EQ(DeleteProgressText("gpt", progress, absl::ZeroDuration()),
            "deleting job gpt: 0%, 0 B of 8.0 GiB");
  progress.set_bytes(uint64_t{2} << 30);
  EXPECT_EQ(DeleteProgressText("gpt", progress, absl::Seconds(2)),
            "deleting job gpt: 25%, 2.0 GiB of 8.0 GiB at 1.0 GiB/s, 6 s left");
}

TEST(ProgressTextTest, ABugReportSaysWhichPartItFetches) {
  EXPECT_EQ(BugReportProgressText("status.json", 1, 12, 0, absl::Seconds(1)),
            "bug report: status.json, 1 of 12 parts, 0 B so far");
  EXPECT_EQ(
      BugReportProgressText("events.jsonl", 7, 12, 3 << 20, absl::Seconds(3)),
      "bug report: events.jsonl, 7 of 12 parts, 3.0 MiB so far, 2.0 a "
      "second, about 3 s left");
}

TEST(ProgressTextTest, MeasuredDirectoriesAreThoseWithAnotherTime) {
  v1::DescribeTiersReply before;
  before.add_directories();
  before.add_directories()->mutable_measured_at()->set_seconds(1000);
  before.add_directories()->mutable_measured_at()->set_seconds(1000);
  EXPECT_EQ(MeasureProgressText(before, before),
            "measuring disks: 0 of 3 directories, about 6 s left");
  v1::DescribeTiersReply now = before;
  now.mutable_directories(0)->mutable_measured_at()->set_seconds(2000);
  now.mutable_directories(1)->mutable_measured_at()->set_nanos(1);
  EXPECT_EQ(MeasureProgressText(before, now),
            "measuring disks: 2 of 3 directories, about 2 s left");
  // The daemon has another configuration now.
  now.clear_directories();
  EXPECT_EQ(MeasureProgressText(before, now),
            "measuring disks: 0 of 3 directories, about 6 s left");
}

TEST(ProgressTextTest, ADrainSaysHowLongItWaits) {
  EXPECT_EQ(DrainProgressText(nullptr, absl::Seconds(9)),
            "draining: waits for open steps, 9 s more at the most");
  EXPECT_EQ(DrainProgressText(nullptr, absl::Seconds(-1)),
            "draining: waits for open steps, 0 s more at the most");
}

TEST(ProgressTextTest, ADrainNamesTheJobsThatItWaitsFor) {
  v1::ListJobsReply jobs;
  jobs.add_jobs()->set_name("idle");
  EXPECT_EQ(DrainProgressText(&jobs, absl::Seconds(9)),
            "draining: waits for open steps, 9 s more at the most; 1 of 1 jobs "
            "have none");
  v1::Job& gpt = *jobs.add_jobs();
  gpt.set_name("gpt");
  gpt.set_open_step("step 12: rank 1 has not committed");
  v1::Job& hanging = *jobs.add_jobs();
  hanging.set_name("hanging");
  hanging.set_ranks_unknown(true);
  EXPECT_EQ(DrainProgressText(&jobs, absl::Seconds(9)),
            "draining: waits for open steps, 9 s more at the most; 1 of 3 jobs "
            "have none; gpt: step 12: rank 1 has not committed; hanging gives "
            "no answer");
  for (int i = 0; i < 3; ++i) {
    jobs.add_jobs()->set_name("late");
    jobs.mutable_jobs()->rbegin()->set_open_step("step 3");
  }
  EXPECT_EQ(DrainProgressText(&jobs, absl::Seconds(9)),
            "draining: waits for open steps, 9 s more at the most; 1 of 6 jobs "
            "have none; gpt: step 12: rank 1 has not committed; hanging gives "
            "no answer; late: step 3; and 2 more");
}

TEST(ProgressTextTest, ARecoveryHasARateAndATimeLeftAtTheMost) {
  v1::Job job;
  job.set_name("gpt");
  EXPECT_EQ(RecoverProgressText(job, 0, absl::ZeroDuration(), absl::Seconds(9)),
            "recovering job gpt: its engine is being started, 9 s more at the "
            "most");
  job.mutable_engine_start()->set_disk_bytes(uint64_t{2} << 30);
  EXPECT_EQ(RecoverProgressText(job, 0, absl::Seconds(2), absl::Seconds(9)),
            "recovering job gpt: its engine has read 2.0 GiB at 1.0 GiB/s, 9 s "
            "more at the most");
  const uint64_t max = uint64_t{8} << 30;
  EXPECT_EQ(RecoverProgressText(job, max, absl::Seconds(2), absl::Seconds(9)),
            "recovering job gpt: its engine has read 2.0 GiB of at most 8.0 "
            "GiB at 1.0 GiB/s, at most 6 s left");
  EXPECT_EQ(
      RecoverProgressText(job, max, absl::ZeroDuration(), absl::Seconds(9)),
      "recovering job gpt: its engine has read 2.0 GiB of at most 8.0 GiB");
  // It has written some of them as well.
  EXPECT_EQ(RecoverProgressText(job, 1, absl::Seconds(2), absl::Seconds(9)),
            "recovering job gpt: its engine has read 2.0 GiB of at most 2.0 "
            "GiB at 1.0 GiB/s, at most 0 s left");
}

}  // namespace
}  // namespace optstate::ctl
