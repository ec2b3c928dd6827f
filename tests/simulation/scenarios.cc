#include "tests/simulation/scenarios.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace optstate::simulation {
namespace {

struct Scenario {
  const char* name;
  absl::StatusOr<Report> (*run)(const ScenarioOptions& options);
};

constexpr Scenario kScenarios[] = {{"attach_storm", RunAttachStorm},
                                   {"rolling_upgrade", RunRollingUpgrade},
                                   {"node_loss", RunNodeLoss}};

}  // namespace

std::vector<std::string> ScenarioNames() {
  std::vector<std::string> names;
  for (const Scenario& scenario : kScenarios) names.emplace_back(scenario.name);
  return names;
}

absl::StatusOr<Report> RunScenario(const std::string& name,
                                   const ScenarioOptions& options) {
  for (const Scenario& scenario : kScenarios) {
    if (name == scenario.name) return scenario.run(options);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no scenario \"", name, "\": give one of ",
                   absl::StrJoin(ScenarioNames(), ", "), ", or all"));
}

}  // namespace optstate::simulation
