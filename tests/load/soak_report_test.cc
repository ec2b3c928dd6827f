#include "tests/load/soak_report.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::load {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kRatioMax = 2;
constexpr uint64_t kMiB = 1 << 20;

// A soak in which nothing is wrong: fds and memory go up and down.
SoakReport Steady() {
  SoakReport report;
  for (size_t i = 0; i < 30; ++i) {
    CostSample sample;
    sample.supervisor.fds = 1000 + i % 5;
    sample.supervisor.private_bytes = (50 + i % 3) * kMiB;
    sample.engines.fds = 9000 + i % 7;
    sample.engines.private_bytes = (4000 + i % 20) * kMiB;
    report.samples.push_back(sample);
  }
  report.steps_before_ms = {10, 11, 12};
  report.steps_ms = {90, 100};
  report.steps_after_ms = {12, 13, 14};
  report.calls.answered_ms["GetJob"] = {1};
  report.calls.refused[absl::StatusCode::kResourceExhausted] = 7;
  report.calls.made = 8;
  return report;
}

// Adds something to each sample that depends on its number.
SoakReport With(const std::function<void(size_t, CostSample*)>& add) {
  SoakReport report = Steady();
  for (size_t i = 0; i < report.samples.size(); ++i) {
    add(i, &report.samples[i]);
  }
  return report;
}

TEST(SoakReportTest, NothingIsWrongWithASteadyOne) {
  EXPECT_THAT(Steady().Problems(kRatioMax), IsEmpty());
}

TEST(SoakReportTest, FdsThatLeakAreAProblem) {
  EXPECT_THAT(With([](size_t i, CostSample* sample) {
                sample->supervisor.fds += i;
              }).Problems(kRatioMax),
              ElementsAre(HasSubstr("fds of the supervisor grow: 1007, 1017")));
  EXPECT_THAT(With([](size_t i, CostSample* sample) {
                sample->engines.fds += 2 * i;
              }).Problems(kRatioMax),
              ElementsAre(HasSubstr("fds of the engines grow")));
}

TEST(SoakReportTest, MemoryThatLeaksIsAProblem) {
  EXPECT_THAT(With([](size_t i, CostSample* sample) {
                sample->supervisor.private_bytes += i * kMiB;
              }).Problems(kRatioMax),
              ElementsAre(HasSubstr("private memory of the supervisor grows")));
  EXPECT_THAT(With([](size_t i, CostSample* sample) {
                sample->engines.private_bytes += 10 * i * kMiB;
              }).Problems(kRatioMax),
              ElementsAre(HasSubstr("private memory of the engines grows")));
}

// Whatever is made at first use is there after a while, and grows no more.
TEST(SoakReportTest, OneStepUpIsNone) {
  EXPECT_THAT(With([](size_t i, CostSample* sample) {
                if (i < 6) return;
                sample->supervisor.fds += 100;
                sample->supervisor.private_bytes += 200 * kMiB;
              }).Problems(kRatioMax),
              IsEmpty());
}

TEST(SoakReportTest, StepsThatStaySlowAreAProblem) {
  SoakReport report = Steady();
  report.steps_after_ms = {12, 13, 25};
  EXPECT_THAT(report.Problems(kRatioMax),
              ElementsAre(HasSubstr("25.000 ms after the soak and 12.000 ms "
                                    "before: more than 2.00 times")));
  EXPECT_THAT(report.Problems(3), IsEmpty());
}

TEST(SoakReportTest, CallsWithoutAnAnswerAreAProblem) {
  SoakReport report = Steady();
  report.calls.refused[absl::StatusCode::kDeadlineExceeded] = 3;
  report.calls.wrong = "GetStatus has 3 jobs of 4";
  EXPECT_THAT(report.Problems(kRatioMax),
              ElementsAre("GetStatus has 3 jobs of 4",
                          "3 calls ended with DEADLINE_EXCEEDED"));
  report = Steady();
  report.calls.answered_ms.clear();
  EXPECT_THAT(report.Problems(kRatioMax), ElementsAre("no call was answered"));
}

TEST(SoakReportTest, TooFewSamplesTellNothing) {
  SoakReport report = Steady();
  report.samples.resize(SoakReport::kSamplesMin - 1);
  EXPECT_THAT(report.Problems(kRatioMax),
              ElementsAre(HasSubstr("only 8 samples")));
}

}  // namespace
}  // namespace optstate::load
