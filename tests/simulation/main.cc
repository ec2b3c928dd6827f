// Simulates many nodes around the real job and the real parts of the
// supervisor; see README.md.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/simulation/mutation.h"
#include "tests/simulation/plot.h"
#include "tests/simulation/report.h"
#include "tests/simulation/scenarios.h"

namespace optstate::simulation {
namespace {

int Main(int argc, char** argv) {
  ScenarioOptions options;
  std::string scenario = "all";
  std::string plot;
  std::string csv;
  std::string mutation;
  CLI::App app("Simulates many nodes of one job", "simulation");
  const auto add = [&app](const char* name, auto& value, const char* text) {
    app.add_option(name, value, text)->capture_default_str();
  };
  add("--nodes", options.nodes, "each with a daemon");
  add("--ranks", options.ranks, "of each node");
  add("--scenario", scenario,
      "attach_storm, rolling_upgrade, node_loss, or all");
  add("--seed", options.seed, "of all that is drawn");
  add("--lost-nodes", options.lost_nodes, "of node_loss");
  add("--knocks", options.knocks,
      "of another user at each daemon, in attach_storm");
  add("--plot", plot, "an SVG to write; an absolute path under `bazel run`");
  add("--csv", csv,
      "the table as comma-separated values to write, for plot_costs.py; an "
      "absolute path under `bazel run`");
  // For those who look at the scenarios themselves; see mutation.h.
  app.add_option("--mutation", mutation, "how nodes break the protocol")
      ->group("");
  CLI11_PARSE(app, argc, argv);
  if (!mutation.empty()) {
    const absl::StatusOr<Mutation> named = MutationNamed(mutation);
    if (!named.ok()) {
      std::cerr << named.status() << std::endl;
      return 1;
    }
    options.mutation = *named;
  }

  std::cout << "seed " << options.seed << std::endl;
  const std::vector<std::string> names =
      scenario == "all" ? ScenarioNames() : std::vector<std::string>{scenario};
  std::vector<Report> reports;
  bool passed = true;
  for (const std::string& name : names) {
    absl::StatusOr<Report> report = RunScenario(name, options);
    if (!report.ok()) {
      std::cerr << name << ": " << report.status() << std::endl;
      passed = false;
      continue;
    }
    passed = passed && report->violations.empty();
    reports.push_back(*std::move(report));
  }
  std::cout << TableOf(reports);
  const auto write = [&passed](const std::string& text,
                               const std::string& path) {
    if (path.empty()) return;
    const absl::Status written = WriteText(text, path);
    if (written.ok()) return;
    std::cerr << written << std::endl;
    passed = false;
  };
  write(PlotOf(reports), plot);
  write(CsvOf(reports), csv);
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace optstate::simulation

int main(int argc, char** argv) {
  try {
    return optstate::simulation::Main(argc, argv);
  } catch (const std::exception& error) {
    // Only libraries throw, for lack of memory.
    std::fprintf(stderr, "simulation: %s\n", error.what());
    return 1;
  }
}
