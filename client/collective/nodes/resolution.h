#ifndef OPTSTATE_CLIENT_COLLECTIVE_NODES_RESOLUTION_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NODES_RESOLUTION_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/step_verdict.h"

namespace optstate::client {

// Nodes resolve a step whose decision some of them do not know, by one pure
// function: the same rule decides while ranks live and when others attach after
// them. server/session/README.md has it as a table ("Steps of several nodes").
// These are its rows for nodes that hold the same parameters, as the Python
// package has them (_torch/nodes/resolution.py); //tests/simulation tests both
// with the same cases.

// A step that was prepared or taken.
struct NodeStep {
  uint64_t step = 0;
  uint64_t digest = 0;  // of what was prepared; 0: taken in one phase
  bool found_inf = false;
};

// How far one node's job is.
struct NodePosition {
  NodeStep committed;
  std::optional<NodeStep> prepared = std::nullopt;
  uint32_t loads_finished = 0;
  uint64_t durable_step = 0;
};

// Returns what all do with a step that each rank's node has prepared, or taken
// already, or (nullopt) could not prepare: commit when all digests are equal,
// skip when moreover some node has found Inf or NaN, else abort.
Verdict DecideVotes(absl::Span<const std::optional<NodeStep>> votes);

// Returns, by node, the verdict that its prepared step gets now. Empty: all are
// at the same step, and none is prepared. Ask for the positions again after the
// verdicts are brought.
//
// `positions`: by node; nullopt: it has no such job. `names`: of the nodes.
// FAILED_PRECONDITION: the nodes are at different steps and none can catch up;
// names each node's, and says how to go on.
absl::StatusOr<std::map<size_t, Verdict>> Resolve(
    absl::Span<const std::optional<NodePosition>> positions,
    absl::Span<const std::string> names);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NODES_RESOLUTION_H_
