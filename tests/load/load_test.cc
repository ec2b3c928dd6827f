// The load of the benchmark, in small: what is counted must be right. No time
// is looked at.

#include <cstdint>
#include <iostream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/load/flood_process.h"
#include "tests/load/flood_scenario.h"
#include "tests/load/load_scenario.h"
#include "tests/load/soak_report.h"

namespace optstate::load {
namespace {

constexpr uint32_t kJobs = 8;
constexpr uint32_t kSessions = 32;
constexpr uint64_t kSteps = 25;
constexpr uint64_t kCalls = 1200;
constexpr int kRounds = 2;
// The supervisor's memory may grow by this with all that it has been asked: a
// sanitizer keeps what is freed, up to 256 MiB.
constexpr uint64_t kGrowthBytesMax = 512 << 20;

LoadOptions Options(bool grpc) {
  LoadOptions options;
  options.jobs = kJobs;
  options.sessions = kSessions;
  options.grpc = grpc;
  options.call_threads = 8;
  options.channels = 4;
  options.rounds = kRounds;
  options.steps.count = kSteps;
  options.calls.count = kCalls;
  return options;
}

// Expects every call to be answered, or refused because too many of this caller
// are under way.
void ExpectAnswered(const AdminTally& tally) {
  EXPECT_EQ(tally.wrong, "");
  EXPECT_EQ(tally.made, kRounds * kCalls);
  uint64_t refused = 0;
  for (const auto& [code, count] : tally.refused) {
    EXPECT_EQ(code, absl::StatusCode::kResourceExhausted)
        << count << " calls ended with " << absl::StatusCodeToString(code);
    refused += count;
  }
  EXPECT_EQ(tally.answered() + refused, tally.made);
  for (const char* const method : {"GetStatus", "ListJobs", "GetJob"}) {
    const auto found = tally.answered_ms.find(method);
    EXPECT_TRUE(found != tally.answered_ms.end() && !found->second.empty())
        << "no answer to " << method;
  }
}

class LoadTest : public testing::TestWithParam<bool> {};

TEST_P(LoadTest, ManyJobsStepBesideManyCalls) {
  const absl::StatusOr<LoadReport> report = RunLoad(Options(GetParam()));
  ASSERT_TRUE(report.ok()) << report.status();
  std::cerr << report->ToString();
  ExpectAnswered(report->calls_alone);
  EXPECT_EQ(report->calls_bare.answered(), report->calls_bare.made);
  ExpectAnswered(report->calls);
  EXPECT_EQ(report->steps_alone_ms.size(), kRounds * kJobs * kSteps);
  EXPECT_EQ(report->steps_ms.size(), kRounds * kJobs * kSteps);
  // Steps alone, beside calls, and those beside which the costs were sampled.
  EXPECT_EQ(report->steps, kJobs * kSteps * (2 * kRounds + 1));
  EXPECT_EQ(report->opened.engines.processes, kJobs);
  EXPECT_EQ(report->stepped.engines.processes, kJobs);
  EXPECT_EQ(report->before.engines.processes, 0);
  EXPECT_EQ(report->after.engines.processes, 0);
  EXPECT_EQ(report->after.supervisor.fds, report->before.supervisor.fds);
  EXPECT_LT(report->after.supervisor.resident_bytes,
            report->before.supervisor.resident_bytes + kGrowthBytesMax);
}

INSTANTIATE_TEST_SUITE_P(Wires, LoadTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& grpc) {
                           return std::string(grpc.param ? "Grpc" : "Shm");
                         });

// Answers that may be old are right in all that is checked: names, numbers of
// jobs, and steps at the end.
TEST(AgeTest, CallsThatTakeOldAnswers) {
  LoadOptions options = Options(/*grpc=*/false);
  options.age_max_ms = 1000;
  const absl::StatusOr<LoadReport> report = RunLoad(options);
  ASSERT_TRUE(report.ok()) << report.status();
  std::cerr << report->ToString();
  ExpectAnswered(report->calls_alone);
  ExpectAnswered(report->calls);
  EXPECT_EQ(report->after.supervisor.fds, report->before.supervisor.fds);
}

// The judgement has a test of its own, soak_report_test: a short soak has too
// few samples to tell.
TEST(SoakTest, ASoakLooksAtTheCostsBetweenTwoSlicesOfSteps) {
  LoadOptions options = Options(/*grpc=*/false);
  options.soak.emplace();
  options.soak_steps.count = 2 * kSteps;
  options.soak_calls.count = kCalls;
  const absl::StatusOr<LoadReport> report = RunLoad(options);
  ASSERT_TRUE(report.ok()) << report.status();
  std::cerr << report->ToString();
  ASSERT_TRUE(report->soak.has_value());
  const SoakReport& soak = *report->soak;
  EXPECT_EQ(soak.steps_before_ms.size(), kJobs * kSteps);
  EXPECT_EQ(soak.steps_ms.size(), 2 * kJobs * kSteps);
  EXPECT_EQ(soak.steps_after_ms.size(), kJobs * kSteps);
  EXPECT_EQ(report->steps, kJobs * kSteps * 4);
  EXPECT_EQ(soak.calls.made, kCalls);
  EXPECT_EQ(soak.calls.wrong, "");
  ASSERT_FALSE(soak.samples.empty());
  EXPECT_EQ(soak.samples.front().engines.processes, kJobs);
  EXPECT_GE(soak.samples.front().supervisor.fds, kSessions);
  EXPECT_EQ(report->after.supervisor.fds, report->before.supervisor.fds);
}

TEST(LoadOptionsTest, MoreJobsThanSessionsAreRefused) {
  LoadOptions options;
  options.jobs = 2;
  options.sessions = 1;
  const absl::Status status = RunLoad(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST(FloodTest, AnotherUsersFloodIsRefusedAndTheJobStepsOn) {
  const absl::Status may = CheckMayFlood();
  if (absl::IsFailedPrecondition(may)) GTEST_SKIP() << may.message();
  ASSERT_TRUE(may.ok()) << may;
  FloodOptions options;
  options.elements = 1 << 14;
  options.seed = ScriptSeed();
  options.flood_rounds = 10;
  options.rounds = 2;
  options.spins = false;
  const absl::StatusOr<FloodReport> report = RunFlood(options);
  ASSERT_TRUE(report.ok()) << report.status();
  std::cerr << report->ToString();
  for (const char* const what :
       {"silent", "hung_up", "garbage", "garbage_http2", "malformed_hello",
        "huge_hello", "refused_job RESOURCE_EXHAUSTED",
        "refused_registration RESOURCE_EXHAUSTED", "hello_to_engine",
        "garbage_push", "push_out_of_order"}) {
    EXPECT_GT(report->CountOf(what), 0u) << what;
  }
  EXPECT_EQ(report->CountOf("refused_registration OK"), 0u);
  EXPECT_EQ(report->CountOf("push_out_of_order OK"), 0u);
  for (const auto& [what, count] : report->counts) {
    EXPECT_FALSE(absl::EndsWith(what, " UNKNOWN") ||
                 absl::EndsWith(what, " INTERNAL") ||
                 absl::EndsWith(what, " DEADLINE_EXCEEDED"))
        << what << ": " << count;
  }
  EXPECT_LE(report->jobs_of_flood_max, kFloodJobsMax);
  EXPECT_FALSE(report->flood_ms.empty());
}

}  // namespace
}  // namespace optstate::load
