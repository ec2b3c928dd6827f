// Measures what many sessions, jobs and questions cost, and what a flood by one
// user costs another; see README.md.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <random>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/load/flood_scenario.h"
#include "tests/load/load_scenario.h"

namespace optstate::load {
namespace {

struct Settings {
  LoadOptions load;
  FloodOptions flood;
  double slice_s = 10;
  double flood_slice_s = 3;
  int64_t step_interval_ms = 0;
  bool only_load = false;
  bool only_flood = false;
};

Settings Defaults() {
  Settings settings;
  settings.load.jobs = 256;
  settings.load.sessions = 1024;
  settings.load.calls_per_second = 10'000;
  settings.load.call_threads = 12;
  settings.load.channels = 4;
  settings.load.lists_every = 100;
  settings.load.rounds = 6;
  settings.flood.seed = std::random_device{}();
  settings.flood.rounds = 10;
  return settings;
}

void AddOptions(Settings* settings, CLI::App* app) {
  const auto add = [app](const char* name, auto& value, const char* text) {
    app->add_option(name, value, text)->capture_default_str();
  };
  add("--jobs", settings->load.jobs, "of the load");
  add("--sessions", settings->load.sessions, "of all jobs together");
  add("--elements", settings->load.elements, "of a job of the load");
  app->add_flag("--grpc", settings->load.grpc, "ranks over gRPC");
  add("--step-interval-ms", settings->step_interval_ms,
      "from a job's step to its next; 0: no pause");
  add("--calls-per-second", settings->load.calls_per_second,
      "of Admin; 0: as fast as they are answered");
  add("--call-threads", settings->load.call_threads, "calls at once");
  add("--channels", settings->load.channels, "connections of these calls");
  add("--lists-every", settings->load.lists_every,
      "one of so many calls asks all engines");
  add("--max-age-ms", settings->load.age_max_ms,
      "the age that what engines have said may have; 0: it is of the call");
  add("--rounds", settings->load.rounds, "of the load, three slices each");
  add("--slice-s", settings->slice_s, "a slice of the load");
  add("--flood-elements", settings->flood.elements, "of the other user's job");
  add("--flood-threads", settings->flood.threads, "of the flood");
  add("--flood-rounds", settings->flood.rounds, "three slices each");
  add("--flood-slice-s", settings->flood_slice_s, "a slice beside the flood");
  add("--seed", settings->flood.seed, "of the flood");
  auto* const only_load =
      app->add_flag("--only-load", settings->only_load, "no flood");
  app->add_flag("--only-flood", settings->only_flood, "no load")
      ->excludes(only_load);
}

// Prints a report, or why there is none; returns whether there is one.
template <typename Report>
bool Print(const char* title, const absl::StatusOr<Report>& report) {
  std::cout << title << "\n"
            << (report.ok() ? report->ToString()
                            : "FAIL: " + report.status().ToString())
            << std::endl;
  return report.ok();
}

int Main(int argc, char** argv) {
  Settings settings = Defaults();
  CLI::App app("Measures a daemon under load", "load_benchmark");
  AddOptions(&settings, &app);
  CLI11_PARSE(app, argc, argv);
  settings.load.steps.time = absl::Seconds(settings.slice_s);
  settings.load.calls.time = absl::Seconds(settings.slice_s);
  settings.load.step_interval = absl::Milliseconds(settings.step_interval_ms);
  settings.flood.slice = absl::Seconds(settings.flood_slice_s);
  bool passed = true;
  if (!settings.only_flood) {
    passed = Print("load", RunLoad(settings.load)) && passed;
  }
  if (!settings.only_load) {
    std::cout << "seed " << settings.flood.seed << std::endl;
    passed = Print("flood", RunFlood(settings.flood)) && passed;
  }
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace optstate::load

int main(int argc, char** argv) {
  try {
    return optstate::load::Main(argc, argv);
  } catch (const std::exception& error) {
    // Only libraries throw, for lack of memory or of threads.
    std::fprintf(stderr, "load_benchmark: %s\n", error.what());
    return 1;
  }
}
