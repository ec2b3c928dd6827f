#ifndef OPTSTATE_TESTS_SIMULATION_SCENARIOS_H_
#define OPTSTATE_TESTS_SIMULATION_SCENARIOS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/simulation/model.h"
#include "tests/simulation/mutation.h"
#include "tests/simulation/report.h"

namespace optstate::simulation {

struct ScenarioOptions {
  uint32_t nodes = 1000;
  uint32_t ranks = 8;  // of each node
  uint64_t seed = 1;
  uint32_t lost_nodes = 10;  // of node_loss
  // Hellos of another user at each node, of attach_storm.
  uint32_t knocks = 600;
  // How all nodes break the protocol; for tests of the scenarios.
  Mutation mutation = Mutation::kNone;
  Model model;
};

// All ranks of all nodes attach at one moment: first they make the job and load
// it, then they find it, while another user knocks at every daemon.
absl::StatusOr<Report> RunAttachStorm(const ScenarioOptions& options);

// Training goes on while the daemon and the engine of each node are replaced,
// one node after the other; some engines are killed, and a quarter of the nodes
// is cut off for a while.
absl::StatusOr<Report> RunRollingUpgrade(const ScenarioOptions& options);

// Nodes are lost while the decision about a step is on its way to all. The
// ranks of the others end and come again, without the lost nodes. Then a node
// without the job wants to join, and is refused.
absl::StatusOr<Report> RunNodeLoss(const ScenarioOptions& options);

// The scenarios by name, in this order.
std::vector<std::string> ScenarioNames();
// Runs one. INVALID_ARGUMENT: there is none of this name, or the options cannot
// be had. An error says that a simulation did not come to its end; what it
// found wrong is in Report::violations.
absl::StatusOr<Report> RunScenario(const std::string& name,
                                   const ScenarioOptions& options);

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_SCENARIOS_H_
