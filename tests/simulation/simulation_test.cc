// The simulation in small: what its scenarios check holds, its times and costs
// are bounded, and a seed says all. Only simulated times are looked at.

#include <cstdint>
#include <iostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/observe/peer_log.h"
#include "tests/load/quantiles.h"
#include "tests/simulation/model.h"
#include "tests/simulation/plot.h"
#include "tests/simulation/process_memory.h"
#include "tests/simulation/report.h"
#include "tests/simulation/scenarios.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OPTSTATE_HAS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(memory_sanitizer) || \
    __has_feature(thread_sanitizer)
#define OPTSTATE_HAS_SANITIZER 1
#endif
#endif
#ifndef OPTSTATE_HAS_SANITIZER
#define OPTSTATE_HAS_SANITIZER 0
#endif

namespace optstate::simulation {
namespace {

constexpr uint64_t kSeeds = 3;
// The files of a tiny job: the marks of the ranks that a job may have take 64
// KiB, two state arrays of a tile 16 KiB each, the undo 20 KiB.
constexpr uint64_t kFileBytesMax = 512 << 10;
// The memory of a node beside its files: job, ranks, supervisor, and its part
// of the simulation itself.
constexpr uint64_t kHeapBytesMax = 4 << 20;
// Log lines that a node writes by itself, without its ranks' sessions.
constexpr uint64_t kOwnLinesMax = 40;

ScenarioOptions Options(uint64_t seed) {
  ScenarioOptions options;
  options.nodes = 20;
  options.ranks = 4;
  options.seed = seed;
  options.lost_nodes = 5;
  return options;
}

Report Simulate(const std::string& scenario, const ScenarioOptions& options) {
  absl::StatusOr<Report> report = RunScenario(scenario, options);
  EXPECT_TRUE(report.ok()) << scenario << ", seed " << options.seed << ": "
                           << report.status();
  if (!report.ok()) return Report();
  for (const std::string& violation : report->violations) {
    ADD_FAILURE() << scenario << ", seed " << options.seed << ": " << violation;
  }
  return *std::move(report);
}

class ScenarioTest
    : public testing::TestWithParam<std::tuple<std::string, uint64_t>> {
 protected:
  std::string scenario() const { return std::get<0>(GetParam()); }
  uint64_t seed() const { return std::get<1>(GetParam()); }
};

TEST_P(ScenarioTest, HoldsWhatItPromises) {
  const ScenarioOptions options = Options(seed());
  const Report report = Simulate(scenario(), options);
  std::cerr << TableOf({&report, 1});
  EXPECT_GT(report.steps, 0u);
  // No attempt at a step fails on a node, so that one all-gather takes it; a
  // step that was decided when nodes were lost has been taken without another.
  EXPECT_DOUBLE_EQ(report.rounds_per_step, 1);
  EXPECT_LE(report.file_bytes_per_node, kFileBytesMax);
  // A sanitizer keeps what is freed.
  if (!OPTSTATE_HAS_SANITIZER) {
    EXPECT_LE(report.heap_bytes_per_node, kHeapBytesMax);
  }
}

TEST_P(ScenarioTest, ASeedSaysAll) {
  const Report first = Simulate(scenario(), Options(seed()));
  const Report again = Simulate(scenario(), Options(seed()));
  EXPECT_EQ(first.trace_hash, again.trace_hash);
  EXPECT_EQ(first.events, again.events);
  EXPECT_EQ(first.log_lines, again.log_lines);
  const Report other = Simulate(scenario(), Options(seed() + kSeeds));
  EXPECT_NE(first.trace_hash, other.trace_hash);
}

INSTANTIATE_TEST_SUITE_P(
    AllScenarios, ScenarioTest,
    testing::Combine(testing::ValuesIn(ScenarioNames()),
                     testing::Range<uint64_t>(1, 1 + kSeeds)),
    [](const testing::TestParamInfo<std::tuple<std::string, uint64_t>>& test) {
      return absl::StrCat(std::get<0>(test.param), "_seed_",
                          std::get<1>(test.param));
    });

TEST(AttachStormTest, AttachTimesGrowNoFasterThanNodes) {
  ScenarioOptions options = Options(1);
  // Without the few times that are ten times as long: the more nodes there are,
  // the more of them have one.
  options.model.loss_probability = 0;
  for (DrawnTime* const time :
       {&options.model.network, &options.model.local, &options.model.hello,
        &options.model.engine_start, &options.model.attach}) {
    time->tail_one_in = 0;
  }
  const Report few = Simulate("attach_storm", options);
  options.nodes *= 3;
  const Report many = Simulate("attach_storm", options);
  const load::Quantiles few_ms = load::QuantilesOf(few.attach_ms);
  const load::Quantiles many_ms = load::QuantilesOf(many.attach_ms);
  EXPECT_GT(few_ms.max_ms, 0);
  EXPECT_LE(many_ms.max_ms, 3 * few_ms.max_ms);
  EXPECT_LE(many_ms.p50_ms, 3 * few_ms.p50_ms);
  // The cost of a node does not hang on how many there are.
  EXPECT_LE(many.file_bytes_per_node, few.file_bytes_per_node * 11 / 10);
  EXPECT_LE(many.log_lines_max(), few.log_lines_max() + kOwnLinesMax);
}

TEST(AttachStormTest, AStrangersLinesAreBounded) {
  const ScenarioOptions options = Options(2);
  const Report report = Simulate("attach_storm", options);
  const auto of_stranger = static_cast<uint64_t>(
      observe::LineLimiter::kBurst +
      observe::LineLimiter::kLinesPerSecond * report.simulated_s);
  // Each rank attaches and leaves twice.
  const uint64_t lines_max =
      of_stranger + uint64_t{4} * options.ranks + kOwnLinesMax;
  // Else the bound would say nothing.
  ASSERT_GT(options.knocks, lines_max);
  EXPECT_LE(report.log_lines_max(), lines_max);
  EXPECT_GT(report.log_lines_max(), 0u);
}

TEST(RollingUpgradeTest, NodesAreUpgradedAtAllPointsOfAStep) {
  uint64_t between = 0;
  uint64_t prepared = 0;
  uint64_t within = 0;
  uint64_t killed = 0;
  for (uint64_t seed = 1; seed <= 2 * kSeeds; ++seed) {
    const Report report = Simulate("rolling_upgrade", Options(seed));
    between += report.CountOf("upgraded between steps");
    prepared += report.CountOf("with a step prepared");
    within += report.CountOf("within a step");
    killed += report.CountOf("engines killed");
    EXPECT_GT(report.CountOf("held by a partition"), 0u);
  }
  EXPECT_GT(between, 0u);
  EXPECT_GT(prepared, 0u);
  EXPECT_GT(within, 0u);
  EXPECT_GT(killed, 0u);
}

TEST(NodeLossTest, SomeHaveTakenTheStepAndOthersOnlyPreparedIt) {
  uint64_t runs_parted = 0;
  for (uint64_t seed = 1; seed <= 2 * kSeeds; ++seed) {
    const Report report = Simulate("node_loss", Options(seed));
    runs_parted += report.CountOf("survivors that had taken the step") > 0 &&
                   report.CountOf("survivors that had it prepared") > 0;
  }
  EXPECT_GT(runs_parted, 0u);
}

TEST(ScenarioOptionsTest, WhatCannotBeIsRefused) {
  ScenarioOptions options = Options(1);
  const absl::Status unknown = RunScenario("no_such", options).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(unknown.message(), "attach_storm")) << unknown;
  options.lost_nodes = options.nodes;
  EXPECT_EQ(RunScenario("node_loss", options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options.ranks = 1000;
  EXPECT_EQ(RunScenario("attach_storm", options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options.ranks = 1;
  options.nodes = 0;
  EXPECT_EQ(RunScenario("attach_storm", options).status().code(),
            absl::StatusCode::kInvalidArgument);
  const absl::Status too_many =
      ReserveFilesAndMappings(UINT64_MAX, /*mappings=*/1);
  if (too_many.ok()) GTEST_SKIP() << "no limit of open files is known";
  EXPECT_EQ(too_many.code(), absl::StatusCode::kResourceExhausted) << too_many;
  EXPECT_TRUE(absl::StrContains(too_many.message(), "--nodes")) << too_many;
}

TEST(CsvTest, HasALineForEachSimulation) {
  Report report;
  report.scenario = "node_loss";
  report.seed = 7;
  report.nodes = 20;
  report.ranks = 4;
  report.attach_ms = {0.5, 2.25};
  report.steps = 14;
  report.rounds_per_step = 1;
  report.cpu_ms_per_node = 1.5;
  report.heap_bytes_per_node = 300;
  report.file_bytes_per_node = 400;
  report.log_lines = {4, 5};
  const std::string names =
      "scenario,seed,nodes,ranks,attach_p50_ms,attach_p99_ms,attach_max_ms,"
      "again_p99_ms,cpu_ms_per_node,heap_bytes_per_node,file_bytes_per_node,"
      "log_lines_mean,log_lines_max,steps,rounds_per_step\n";
  EXPECT_EQ(CsvOf({}), names);
  EXPECT_EQ(CsvOf({&report, 1}),
            names + "node_loss,7,20,4,0.5,2.25,2.25,,1.5,300,400,4.5,5,14,1\n");
  report.attach_again_ms = {8};
  EXPECT_TRUE(absl::StrContains(CsvOf({&report, 1}), ",2.25,8,1.5,"));
}

TEST(CsvTest, AFileThatCannotBeWrittenIsAnError) {
  const absl::Status status = WriteText("text", "/no/such/folder/file.csv");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
}

TEST(PlotTest, HasACurveForEachPanel) {
  Report report;
  report.scenario = "attach_storm";
  report.attach_ms = {3, 1, 2};
  report.log_lines = {4, 4};
  const std::string svg = PlotOf({&report, 1});
  EXPECT_TRUE(absl::StartsWith(svg, "<svg ")) << svg;
  EXPECT_TRUE(absl::EndsWith(svg, "</svg>\n")) << svg;
  size_t curves = 0;
  for (size_t at = svg.find("<polyline"); at != std::string::npos;
       at = svg.find("<polyline", at + 1)) {
    ++curves;
  }
  EXPECT_EQ(curves, 2u);
  EXPECT_EQ(svg, PlotOf({&report, 1}));
}

}  // namespace
}  // namespace optstate::simulation
