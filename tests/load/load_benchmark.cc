// Measures what many sessions, jobs and questions cost, and what a flood by one
// user costs another; see README.md.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "tests/load/flood_scenario.h"
#include "tests/load/load_scenario.h"
#include "tests/load/quantiles.h"
#include "tests/load/soak_report.h"

namespace optstate::load {
namespace {

// The exit status of what cannot run on this machine (deploy/nightly).
constexpr int kExitSkipped = 3;
// How often the costs are looked at in a soak: more often than it takes to
// tell, because a look at hundreds of engines takes seconds itself.
constexpr double kSoakSamples = 3 * SoakReport::kSamplesMin;

struct Settings {
  LoadOptions load;
  FloodOptions flood;
  double slice_s = 10;
  double flood_slice_s = 3;
  double seconds = 0;
  double p99_ratio_max = 2;
  double flood_ratio_max = 0;
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
  add("--seconds", settings->seconds,
      "a soak so long, judged, in place of rounds and flood; 0: none");
  add("--p99-ratio-max", settings->p99_ratio_max,
      "p99 of steps after the soak / before, at most");
  add("--flood-elements", settings->flood.elements, "of the other user's job");
  add("--flood-threads", settings->flood.threads, "of the flood");
  add("--flood-rounds", settings->flood.rounds, "three slices each");
  add("--flood-ratio-max", settings->flood_ratio_max,
      "p99 of steps beside the flood / beside as many busy cores, at most; 0: "
      "any");
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

// Returns whether the flood has ended, and left the other user's steps as fast
// as is asked.
bool Flood(const FloodOptions& options, double ratio_max) {
  std::cout << "seed " << options.seed << std::endl;
  const absl::StatusOr<FloodReport> report = RunFlood(options);
  if (!Print("flood", report)) return false;
  const double ratio = P99Ratio(report->flood_ms, report->spin_ms);
  if (ratio_max == 0 || ratio <= ratio_max) return true;
  std::cout << absl::StrFormat("FAIL: p99 flood / spin is %.2f, of %.2f", ratio,
                               ratio_max)
            << std::endl;
  return false;
}

// Runs the soak; the last line says how it ended.
int Soak(const LoadOptions& options, double p99_ratio_max) {
  const absl::Status room = CheckResources(options);
  if (absl::IsResourceExhausted(room)) {
    std::cout << "SKIPPED: " << room.message() << std::endl;
    return kExitSkipped;
  }
  const absl::StatusOr<LoadReport> report = RunLoad(options);
  if (!Print("soak", report)) return 1;
  const std::vector<std::string> problems =
      report->soak->Problems(p99_ratio_max);
  for (const std::string& problem : problems) {
    std::cout << "FAIL: " << problem << std::endl;
  }
  if (!problems.empty()) return 1;
  std::cout << absl::StrFormat(
                   "fds and memory are steady; p99 of steps after / before: "
                   "%.2f, of at most %.2f",
                   P99Ratio(report->soak->steps_after_ms,
                            report->soak->steps_before_ms),
                   p99_ratio_max)
            << std::endl;
  return 0;
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
  if (settings.seconds > 0) {
    settings.load.soak =
        SoakOptions{absl::Seconds(settings.seconds / kSoakSamples)};
    settings.load.soak_steps.time = absl::Seconds(settings.seconds);
    settings.load.soak_calls.time = absl::Seconds(settings.seconds);
    return Soak(settings.load, settings.p99_ratio_max);
  }
  bool passed = true;
  if (!settings.only_flood) {
    passed = Print("load", RunLoad(settings.load)) && passed;
  }
  if (!settings.only_load) {
    passed = Flood(settings.flood, settings.flood_ratio_max) && passed;
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
