#include "tests/crash/campaign.h"

#include <iostream>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/crash/crash_round.h"
#include "tests/crash/random_scenario.h"

namespace optstate::crash {

absl::Status RunCampaign(const CampaignOptions& options, Tally* tally) {
  std::mt19937_64 random(options.seed);
  RandomScenarios scenarios(options.on_disk);
  while (!tally->Reaches(options.quota)) {
    RandomScenarios::Drawn drawn = scenarios.Next(random);
    Scenario& scenario = drawn.scenario;
    scenario.elements = std::uniform_int_distribution<uint64_t>(
        options.elements_min, options.elements_max)(random);
    scenario.steps = options.steps;
    // The kills of a round depend on the machine's timing; the choice of the
    // next round does not.
    std::mt19937_64 round_random(random());
    const std::string name =
        absl::StrCat(Name(drawn.wire), ", ", scenario.Describe(), ", ",
                     scenario.elements, " elements");
    const absl::Status status =
        RunRound(drawn.wire, scenario, options.quota, &round_random, tally);
    std::cerr << "round " << tally->rounds << ": " << name << ": kills "
              << tally->engine << " " << tally->supervisor << " " << tally->rank
              << ", losses of power " << tally->power << ", upgrades "
              << tally->upgrades << std::endl;
    if (!status.ok()) {
      return absl::Status(
          status.code(),
          absl::StrCat(name, " (", scenario.ToWord(), "): ", status.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace optstate::crash
