// Kills processes at random instants by the thousand; see tests/README.md.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <random>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/crash/campaign.h"

namespace optstate::crash {
namespace {

// The least part of engine kills inside a step, without those of upgrades,
// which look for another instant; with fewer, the campaign has tested something
// else.
constexpr double kInStepMin = 0.3;

int Main(int argc, char** argv) {
  CampaignOptions options;
  options.seed = std::random_device{}();
  options.quota = {
      .engine = 1000, .supervisor = 200, .rank = 200, .upgrade = 200};
  options.elements_min = 2 << 20;
  options.elements_max = 8 << 20;
  options.steps = 20;
  CLI::App app("Kills engines, daemons and ranks at random instants",
               "campaign");
  app.add_option("--kills", options.quota.engine, "of engines")
      ->capture_default_str();
  app.add_option("--supervisor-kills", options.quota.supervisor, "of daemons")
      ->capture_default_str();
  app.add_option("--rank-kills", options.quota.rank, "of ranks")
      ->capture_default_str();
  app.add_option("--upgrades", options.quota.upgrade, "some of them disturbed")
      ->capture_default_str();
  app.add_option("--power-cuts", options.quota.power,
                 "of the machine: all processes and all memory; with --on-disk")
      ->capture_default_str();
  app.add_flag("--on-disk", options.on_disk,
               "records are swapped to a disk, steps are durable, or both");
  app.add_option("--seed", options.seed, "repeats a schedule");
  CLI11_PARSE(app, argc, argv);
  if (options.quota.power > 0 && !options.on_disk) {
    std::cerr << "--power-cuts needs --on-disk: memory does not survive them"
              << std::endl;
    return 2;
  }
  std::cout << "seed " << options.seed << std::endl;
  Tally tally;
  const absl::Time begin = absl::Now();
  const absl::Status status = RunCampaign(options, &tally);
  std::cout << tally << "seconds              "
            << absl::ToInt64Seconds(absl::Now() - begin) << std::endl;
  if (!status.ok()) {
    std::cout << "FAIL: " << status << std::endl;
    return 1;
  }
  if (static_cast<double>(tally.engine_in_step) <
      kInStepMin *
          static_cast<double>(tally.engine - tally.engine_in_upgrade)) {
    std::cout << "FAIL: too few engines were killed in a step" << std::endl;
    return 1;
  }
  std::cout << "PASS" << std::endl;
  return 0;
}

}  // namespace
}  // namespace optstate::crash

int main(int argc, char** argv) {
  try {
    return optstate::crash::Main(argc, argv);
  } catch (const std::exception& error) {
    // Only libraries throw, for lack of memory.
    std::fprintf(stderr, "campaign: %s\n", error.what());
    return 1;
  }
}
