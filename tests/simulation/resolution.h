#ifndef OPTSTATE_TESTS_SIMULATION_RESOLUTION_H_
#define OPTSTATE_TESTS_SIMULATION_RESOLUTION_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/step_verdict.h"

// The rules by which nodes that hold the same parameters decide, as
// client/python/optstate/_torch/nodes/resolution.py has them. They are written
// again here because ranks decide in Python; resolution_cases.txt has what
// those rules answer, and both sides are tested with it.

namespace optstate::simulation {

// A step that a node has prepared or taken. digest 0: taken in one phase.
struct NodeStep {
  uint64_t step = 0;
  uint64_t digest = 0;
  bool found_inf = false;

  friend bool operator==(const NodeStep&, const NodeStep&) = default;
};

// How far one node's job is.
struct NodePosition {
  NodeStep committed;
  std::optional<NodeStep> prepared = std::nullopt;
  uint32_t loads_finished = 0;
};

// Returns what all nodes do with a step that each of them has prepared, or
// taken already, or (nullopt) could not prepare.
Verdict DecideVotes(absl::Span<const std::optional<NodeStep>> votes);

// Returns, by node, the verdict that its prepared step gets now. Empty: all
// nodes are at one step, and none is prepared. nullopt: the node has no such
// job. FAILED_PRECONDITION: they are at different steps, and some cannot catch
// up; the text names these.
absl::StatusOr<std::map<uint32_t, Verdict>> ResolvePositions(
    absl::Span<const std::optional<NodePosition>> positions);

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_RESOLUTION_H_
