#include "server/metrics/node_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/check_names.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/metrics/metric_table.h"
#include "server/metrics/shown_jobs.h"
#include "server/metrics/testing_reports.h"
#include "server/observe/counters.h"

namespace optstate::metrics {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class FixedSource : public NodeSource {
 public:
  explicit FixedSource(v1::NodeReport report) : report_(std::move(report)) {}
  v1::NodeReport DescribeNode(absl::Time) override { return report_; }
  bool IsPublic(const v1::Event&) override { return true; }

 private:
  const v1::NodeReport report_;
};

std::string TextOf(v1::NodeReport report) {
  FixedSource source(std::move(report));
  NodeReports reports(&source);
  return ToText(NodeMetrics(&reports));
}

// The lines of samples that begin so, without HELP and TYPE.
std::vector<std::string> Lines(const std::string& text,
                               absl::string_view begin) {
  std::vector<std::string> found;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StartsWith(line, begin)) found.emplace_back(line);
  }
  return found;
}

TEST(MetricTableTest, NamesAreValidAndFollowTheirType) {
  std::set<std::string> names;
  for (const MetricInfo& info : AllMetrics()) {
    const std::string name = info.name;
    EXPECT_TRUE(prometheus::CheckMetricName(name)) << name;
    EXPECT_TRUE(absl::StartsWith(name, "optstate_")) << name;
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(absl::EndsWith(name, "_total"),
              info.type == prometheus::MetricType::Counter)
        << name;
    EXPECT_THAT(info.help, AllOf(Not(HasSubstr("\n")), Not(HasSubstr("\\"))));
    EXPECT_TRUE(absl::EndsWith(info.help, ".")) << name;
  }
}

TEST(NodeMetricsTest, EveryMetricHasSamplesOnAFullNode) {
  const std::string text = TextOf(FullReport());
  for (const MetricInfo& info : AllMetrics()) {
    EXPECT_THAT(text,
                HasSubstr(absl::StrCat("# HELP ", info.name, " ", info.help)));
    EXPECT_THAT(Lines(text, info.name), Not(IsEmpty())) << info.name;
  }
}

TEST(NodeMetricsTest, TheNode) {
  const std::string text = TextOf(FullReport());
  EXPECT_THAT(text, HasSubstr("# TYPE optstate_build_info gauge\n"
                              "optstate_build_info{version=\"0.1.0\","
                              "protocol=\"3\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_start_time_seconds 1690000000\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_draining 1\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_upgrade_running 1\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_state_available_bytes 64000\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_jobs_unanswered 1\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_memory_unlocked_bytes 4000\n"));
  EXPECT_THAT(Lines(text, "optstate_jobs{"),
              ElementsAre("optstate_jobs{phase=\"unknown\"} 1",
                          "optstate_jobs{phase=\"empty\"} 0",
                          "optstate_jobs{phase=\"loading\"} 0",
                          "optstate_jobs{phase=\"ready\"} 2",
                          "optstate_jobs{phase=\"failed\"} 0",
                          "optstate_jobs{phase=\"recovering\"} 0",
                          "optstate_jobs{phase=\"asleep\"} 0"));
}

TEST(NodeMetricsTest, WhatIsNotKnownHasNoSample) {
  v1::NodeReport report = FullReport();
  report.mutable_status()->clear_state_bytes_available();
  report.mutable_tiers()->mutable_memory()->clear_free_bytes();
  report.mutable_tiers()->mutable_memory()->set_budget_bytes(0);
  const std::string text = TextOf(std::move(report));
  EXPECT_THAT(Lines(text, "optstate_state_available_bytes"), IsEmpty());
  EXPECT_THAT(Lines(text, "optstate_frames_budget_bytes"), IsEmpty());
  EXPECT_THAT(
      Lines(text, "optstate_tier_free_bytes"),
      ElementsAre("optstate_tier_free_bytes{tier=\"disk\",directory=\"/mnt/"
                  "a\"} 900000"));
}

TEST(NodeMetricsTest, Tiers) {
  const std::string text = TextOf(FullReport());
  EXPECT_THAT(
      Lines(text, "optstate_tier_up"),
      ElementsAre("optstate_tier_up{tier=\"memory\",directory=\"/dev/shm/"
                  "optstate\"} 1",
                  "optstate_tier_up{tier=\"disk\",directory=\"/mnt/a\"} 1",
                  "optstate_tier_up{tier=\"disk\",directory=\"/mnt/b\"} 0"));
  EXPECT_THAT(Lines(text, "optstate_job_tier_bytes"),
              Contains("optstate_job_tier_bytes{job_name=\"full\","
                       "tier=\"disk\",directory=\"/mnt/a\"} 5000"));
  EXPECT_THAT(
      Lines(text, "optstate_tier_measured_bytes_per_second{tier=\"disk\""),
      ElementsAre(HasSubstr("direction=\"read\"} 3000000000"),
                  HasSubstr("direction=\"write\"} 2000000000"),
                  HasSubstr("direction=\"mixed\"} 2500000000")));
}

TEST(NodeMetricsTest, StepPhasesAreCumulativeHistograms) {
  const std::string text = TextOf(FullReport());
  EXPECT_THAT(
      Lines(text, "optstate_job_step_phase_seconds"),
      AllOf(Contains("optstate_job_step_phase_seconds_count{job_name=\"host\","
                     "phase=\"update\"} 7"),
            Contains("optstate_job_step_phase_seconds_sum{job_name=\"host\","
                     "phase=\"update\"} 1.25"),
            Contains("optstate_job_step_phase_seconds_bucket{job_name=\"host\","
                     "phase=\"update\",le=\"0.001\"} 1"),
            Contains(HasSubstr("job_name=\"host\",phase=\"update\",le=\"0.1"
                               "\"} 5")),
            Contains("optstate_job_step_phase_seconds_bucket{job_name=\"host\","
                     "phase=\"update\",le=\"+Inf\"} 7")));
  EXPECT_THAT(text, HasSubstr("optstate_job_update_bytes_per_second{job_name="
                              "\"host\"} 2000\n"));
}

TEST(NodeMetricsTest, AHangingEngineCostsItsOwnSamples) {
  const std::string text = TextOf(FullReport());
  EXPECT_THAT(Lines(text, "optstate_job_up{"),
              ElementsAre("optstate_job_up{job_name=\"full\"} 1",
                          "optstate_job_up{job_name=\"hangs\"} 0",
                          "optstate_job_up{job_name=\"host\"} 1"));
  std::vector<std::string> of_hanging;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StrContains(line, "\"hangs\"")) of_hanging.emplace_back(line);
  }
  EXPECT_THAT(
      of_hanging,
      ElementsAre(
          "optstate_job_up{job_name=\"hangs\"} 0",
          "optstate_job_phase{job_name=\"hangs\",phase=\"unknown\"} 1",
          "optstate_job_phase{job_name=\"hangs\",phase=\"empty\"} 0",
          "optstate_job_phase{job_name=\"hangs\",phase=\"loading\"} 0",
          "optstate_job_phase{job_name=\"hangs\",phase=\"ready\"} 0",
          "optstate_job_phase{job_name=\"hangs\",phase=\"failed\"} 0",
          "optstate_job_phase{job_name=\"hangs\",phase=\"recovering\"} 0",
          "optstate_job_phase{job_name=\"hangs\",phase=\"asleep\"} 0",
          "optstate_job_ranks{job_name=\"hangs\"} 2",
          "optstate_job_elements{job_name=\"hangs\"} 500",
          "optstate_job_state_bytes{job_name=\"hangs\"} 6000",
          "optstate_job_committed_step{job_name=\"hangs\"} 12",
          "optstate_job_engine_restarts_total{job_name=\"hangs\"} 2"));
}

TEST(NodeMetricsTest, AJobOfWhichNothingIsKnownHasNoStep) {
  v1::NodeReport report;
  v1::Job& job = *report.add_jobs();
  job.set_name("lost");
  job.set_phase(v1::JOB_PHASE_FAILED);
  job.set_state_unknown(true);
  const std::string text = TextOf(std::move(report));
  EXPECT_THAT(Lines(text, "optstate_job_committed_step"), IsEmpty());
  EXPECT_THAT(text, HasSubstr("optstate_job_phase{job_name=\"lost\","
                              "phase=\"failed\"} 1\n"));
}

TEST(NodeMetricsTest, BytesByWire) {
  EXPECT_THAT(Lines(TextOf(FullReport()),
                    "optstate_job_wire_bytes_total{job_name="
                    "\"full\""),
              ElementsAre("optstate_job_wire_bytes_total{job_name=\"full\","
                          "wire=\"shm\",direction=\"gradients\"} 8000",
                          "optstate_job_wire_bytes_total{job_name=\"full\","
                          "wire=\"shm\",direction=\"sent\"} 4000",
                          "optstate_job_wire_bytes_total{job_name=\"full\","
                          "wire=\"shm\",direction=\"loaded\"} 12000",
                          "optstate_job_wire_bytes_total{job_name=\"full\","
                          "wire=\"grpc\",direction=\"gradients\"} 80",
                          "optstate_job_wire_bytes_total{job_name=\"full\","
                          "wire=\"grpc\",direction=\"sent\"} 0",
                          "optstate_job_wire_bytes_total{job_name=\"full\","
                          "wire=\"grpc\",direction=\"loaded\"} 0"));
}

// A code that is common has a sample before it is first seen.
TEST(NodeMetricsTest, RefusedRequestsByCode) {
  const std::string text = TextOf(FullReport());
  const auto lines = [&text](const char* wire) {
    return Lines(text,
                 absl::StrCat("optstate_job_requests_refused_total{job_name="
                              "\"full\",wire=\"",
                              wire, "\""));
  };
  EXPECT_THAT(lines("shm"),
              AllOf(SizeIs(8), Contains(HasSubstr("code=\"aborted\"} 2")),
                    Contains(HasSubstr("code=\"failed_precondition\"} 3")),
                    Contains(HasSubstr("code=\"unavailable\"} 0"))));
  EXPECT_THAT(lines("grpc"), SizeIs(7));
}

TEST(NodeMetricsTest, QueueDepths) {
  const observe::InQueue removal(observe::Queue::kRemoval);
  const uint64_t removals = observe::LengthOf(observe::Queue::kRemoval);
  const std::string text = TextOf(FullReport());
  EXPECT_THAT(
      Lines(text, "optstate_job_queue_depth{job_name=\"full\""),
      ElementsAre("optstate_job_queue_depth{job_name=\"full\",wire=\"shm\","
                  "queue=\"requests\"} 7",
                  "optstate_job_queue_depth{job_name=\"full\",wire=\"shm\","
                  "queue=\"replies\"} 6",
                  "optstate_job_queue_depth{job_name=\"full\",wire=\"grpc\","
                  "queue=\"replies\"} 0"));
  EXPECT_THAT(
      Lines(text, "optstate_queue_depth{"),
      ElementsAre(
          HasSubstr("{queue=\"handshakes\"} "),
          HasSubstr("{queue=\"engine_waits\"} "),
          absl::StrCat("optstate_queue_depth{queue=\"removals\"} ", removals)));
}

TEST(NodeMetricsTest, DiskAndDevices) {
  const std::string text = TextOf(FullReport());
  for (const char* line :
       {"optstate_job_disk_read_bytes_total{job_name=\"full\",directory=\"/mnt/"
        "a\"} 1000",
        "optstate_job_disk_read_bytes_total{job_name=\"full\",directory=\"/mnt/"
        "b\"} 500",
        "optstate_job_disk_errors_total{job_name=\"full\",directory=\"/mnt/a\"}"
        " 1",
        "optstate_job_disk_busy_seconds_total{job_name=\"full\",directory=\"/"
        "mnt/a\"} 1.5",
        "optstate_job_disk_frames_bytes{job_name=\"full\"} 32768",
        "optstate_job_disk_damaged_records{job_name=\"full\"} 2",
        "optstate_job_disk_step_wait_seconds{job_name=\"full\"} 0.25",
        "optstate_job_parameter_fetches_total{job_name=\"full\",from=\"disk\"} "
        "13",
        "optstate_job_device_copied_bytes_total{job_name=\"full\",device=\"0\","
        "direction=\"to_device\"} 2800",
        "optstate_job_device_lost{job_name=\"full\",device=\"0\"} 0",
        "optstate_job_device_lost{job_name=\"full\",device=\"1\"} 1",
        "optstate_job_speculated_steps_rolled_back_total{job_name=\"full\"} "
        "2"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("\n", line, "\n")));
  }
  EXPECT_THAT(Lines(text, "optstate_job_disk_records{job_name=\"host\""),
              IsEmpty());
}

TEST(NodeMetricsTest, JobsBeyondTheLimitAreCountedAlone) {
  v1::NodeReport report;
  for (int i = 0; i < kJobsMax + 44; ++i) {
    *report.add_jobs() = FullJob(absl::StrCat("job", 1000 + i));
    v1::TierJob& bytes = *report.mutable_tiers()->mutable_memory()->add_jobs();
    bytes.set_job(absl::StrCat("job", 1000 + i));
  }
  const std::string text = TextOf(report);
  EXPECT_EQ(Lines(text, "optstate_job_up{").size(), size_t{kJobsMax});
  EXPECT_EQ(Lines(text, "optstate_job_tier_bytes").size(), size_t{kJobsMax});
  EXPECT_THAT(text, HasSubstr("\noptstate_jobs_omitted 44\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_jobs{phase=\"ready\"} 300\n"));
  // Not in a matcher, which would print all of it.
  const std::string json = ToJson(report);
  EXPECT_TRUE(absl::StrContains(json, "\"job1255\""));
  EXPECT_FALSE(absl::StrContains(json, "\"job1256\""));
}

TEST(NodeMetricsTest, AFailedJobIsNotAmongThoseLeftOut) {
  v1::NodeReport report;
  for (int i = 0; i < kJobsMax + 44; ++i) {
    *report.add_jobs() = HostJob(absl::StrCat("job", 1000 + i));
  }
  report.mutable_jobs()->rbegin()->set_phase(v1::JOB_PHASE_FAILED);
  for (const char* job : {"job1254", "job1255", "job1299"}) {
    v1::TierJob& bytes = *report.mutable_tiers()->mutable_memory()->add_jobs();
    bytes.set_job(job);
  }
  const std::string text = TextOf(report);
  EXPECT_EQ(Lines(text, "optstate_job_up{").size(), size_t{kJobsMax});
  EXPECT_THAT(Lines(text, "optstate_job_tier_bytes"),
              ElementsAre(HasSubstr("job1254"), HasSubstr("job1299")));
  EXPECT_THAT(text, HasSubstr("\noptstate_jobs_omitted 44\n"));
  const std::string json = ToJson(report);
  EXPECT_TRUE(absl::StrContains(json, "\"name\":\"job1299\""));
  EXPECT_TRUE(absl::StrContains(json, "\"name\":\"job1254\""));
  EXPECT_FALSE(absl::StrContains(json, "\"job1255\""));
}

// Private jobs come without a name (admin/shown_jobs.h).
TEST(NodeMetricsTest, JobsWithoutANameAreCountedAlone) {
  v1::NodeReport report;
  *report.add_jobs() = HostJob("open");
  report.add_jobs()->set_phase(v1::JOB_PHASE_READY);
  report.add_jobs()->set_phase(v1::JOB_PHASE_FAILED);
  report.mutable_status()->set_job_count(3);
  report.mutable_status()->add_unanswered();
  report.mutable_status()->add_unanswered()->set_name("hangs");
  const int ready = HostJob("open").phase() == v1::JOB_PHASE_READY ? 2 : 1;
  const std::string text = TextOf(report);
  EXPECT_EQ(Lines(text, "optstate_job_up{").size(), 1u);
  EXPECT_THAT(text, HasSubstr(absl::StrCat("\noptstate_jobs{phase=\"ready\"} ",
                                           ready, "\n")));
  EXPECT_THAT(text, HasSubstr("\noptstate_jobs{phase=\"failed\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_jobs_omitted 0\n"));
  EXPECT_THAT(text, HasSubstr("\noptstate_jobs_unanswered 2\n"));
  const std::string json = ToJson(report);
  EXPECT_THAT(json, HasSubstr("\"name\":\"open\""));
  EXPECT_THAT(json, HasSubstr("\"name\":\"hangs\""));
  EXPECT_THAT(json, HasSubstr("\"job_count\":3"));
  EXPECT_THAT(json, Not(HasSubstr("{\"name\":\"\",")));
}

TEST(NodeMetricsTest, LabelsAreEscaped) {
  v1::NodeReport report;
  *report.add_jobs() = HangingJob("a\"b\\c\nd");
  EXPECT_THAT(TextOf(std::move(report)),
              HasSubstr("optstate_job_up{job_name=\"a\\\"b\\\\c\\nd\"} 0\n"));
}

TEST(NodeMetricsTest, OneNameIsOneSeries) {
  v1::NodeReport report;
  *report.add_jobs() = HostJob("a");
  *report.add_jobs() = HostJob("a");
  EXPECT_EQ(Lines(TextOf(std::move(report)), "optstate_job_up{").size(), 1u);
}

TEST(NodeMetricsTest, LargeNumbersKeepTheirDigits) {
  v1::NodeReport report;
  report.mutable_status()->set_state_bytes(1099511627776);  // 1 TiB
  EXPECT_THAT(TextOf(std::move(report)),
              HasSubstr("\noptstate_state_bytes 1099511627776\n"));
}

TEST(NodeMetricsTest, CountersOfTheSupervisor) {
  using observe::Answered;
  const auto before = observe::CountOf(Answered::kSession,
                                       absl::StatusCode::kResourceExhausted);
  observe::Count(Answered::kSession, absl::StatusCode::kResourceExhausted);
  observe::Count(Answered::kSession, absl::StatusCode::kDataLoss);
  const std::string text = TextOf({});
  EXPECT_THAT(
      text, HasSubstr(absl::StrCat("optstate_connections_refused_total{wire="
                                   "\"session\",code=\"resource_exhausted\"} ",
                                   before + 1, "\n")));
  // A code that is rare has a sample once it was seen.
  EXPECT_THAT(text, AllOf(HasSubstr("{wire=\"session\",code=\"data_loss\"} 1"),
                          Not(HasSubstr("{wire=\"grpc\",code=\"data_loss"))));
  EXPECT_THAT(text, HasSubstr("optstate_admin_calls_total{code=\"ok\"} "));
  EXPECT_THAT(Lines(text, "optstate_engine_exits_total"),
              ElementsAre(HasSubstr("{cause=\"stopped\"} "),
                          HasSubstr("{cause=\"replaced\"} "),
                          HasSubstr("{cause=\"died\"} ")));
}

TEST(NodeMetricsTest, JsonHasTheNamesOfTheProtoFileAndDefaults) {
  const std::string json = ToJson(FullReport());
  EXPECT_THAT(json, AllOf(HasSubstr("\"committed_step\":\"41\""),
                          HasSubstr("\"phase\":\"JOB_PHASE_READY\""),
                          HasSubstr("\"ranks_unknown\":false"),
                          HasSubstr("\"events\":[]")));
}

}  // namespace
}  // namespace optstate::metrics
