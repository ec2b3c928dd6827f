#include "tests/crash/campaign.h"

#include <algorithm>
#include <iostream>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/crash/crash_round.h"
#include "tests/crash/running_job.h"
#include "tests/crash/scenario.h"

namespace optstate::crash {
namespace {

struct Kind {
  Wire wire;
  Scenario scenario;
};

// Without seed and sizes.
std::vector<Kind> AllKinds() {
  std::vector<Kind> kinds;
  for (const Wire wire : {Wire::kShm, Wire::kGrpc}) {
    for (const uint32_t world_size : {1u, 2u}) {
      const Scenario plain = {.world_size = world_size};
      Scenario accumulation = plain;
      accumulation.micro_steps = 3;
      Scenario clipping = plain;
      clipping.clip = true;
      Scenario skipping = plain;
      skipping.skip = true;
      Scenario missing = plain;
      missing.missing = true;
      Scenario mixed = plain;
      mixed.mixed = true;
      Scenario everything = accumulation;
      everything.clip = true;
      everything.skip = true;
      everything.missing = true;
      everything.mixed = true;
      for (const Scenario& scenario : {plain, accumulation, clipping, skipping,
                                       missing, mixed, everything}) {
        kinds.push_back({.wire = wire, .scenario = scenario});
      }
    }
  }
  return kinds;
}

}  // namespace

absl::Status RunCampaign(const CampaignOptions& options, Tally* tally) {
  std::mt19937_64 random(options.seed);
  std::vector<Kind> left;
  while (!tally->Reaches(options.quota)) {
    if (left.empty()) {
      left = AllKinds();
      std::shuffle(left.begin(), left.end(), random);
    }
    const Kind kind = left.back();
    left.pop_back();
    Scenario scenario = kind.scenario;
    scenario.seed = random();
    scenario.elements = std::uniform_int_distribution<uint64_t>(
        options.elements_min, options.elements_max)(random);
    scenario.steps = options.steps;
    // What a round kills depends on the machine's timing; what the next one
    // is does not.
    std::mt19937_64 round_random(random());
    const std::string name =
        absl::StrCat(kind.wire == Wire::kShm ? "shm" : "grpc", ", ",
                     scenario.Describe(), ", ", scenario.elements, " elements");
    const absl::Status status =
        RunRound(kind.wire, scenario, options.quota, &round_random, tally);
    std::cerr << "round " << tally->rounds << ": " << name << ": kills "
              << tally->engine << " " << tally->supervisor << " " << tally->rank
              << std::endl;
    if (!status.ok()) {
      return absl::Status(
          status.code(),
          absl::StrCat(name, " (", scenario.ToWord(), "): ", status.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace optstate::crash
