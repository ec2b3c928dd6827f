#ifndef OPTSTATE_CLIENT_COLLECTIVE_NODES_RESOLUTION_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NODES_RESOLUTION_H_

#include <cstddef>
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
// The rules are those of the Python package (_torch/nodes/resolution.py);
// //tests/simulation tests both with the same cases.
//
// Digests are of what one node has prepared. Nodes that hold the same
// parameters (of one *kind*) have equal digests of one step. Nodes that hold
// different ones do not: their steps of one number belong together because of
// the order in which ranks act (sharded/split_agreement.h). They know the norm
// of all gradients only together, so they take a step in one round more: when
// all have prepared it, every node notes that norm (Verdict::kClip), and only
// when all nodes have noted it do they commit. So a step that no node has noted
// can be committed nowhere, and is dropped; one that some node has noted has
// its norm in that node's files.

// The norm and the clipping of all nodes' gradients; as in StepOutcome.
struct NodesNorm {
  double gradient_norm = 0;
  double clip_coefficient = 1;
};

// A step that was prepared or taken.
struct NodeStep {
  uint64_t step = 0;
  // Identifies what was prepared; 0: taken in one phase. Where a norm is noted
  // (ClippedDigest), that of a prepared step is the one from before, and that
  // of a committed step the one from after.
  uint64_t digest = 0;
  bool found_inf = false;
  // The norm of all nodes, where they hold different parameters; nullopt: not
  // noted.
  std::optional<NodesNorm> norm = std::nullopt;
  // A prepared step that its daemon commits only once that norm is noted.
  bool awaits_norm = false;
};

// How far one node's job is.
struct NodePosition {
  NodeStep committed;
  std::optional<NodeStep> prepared = std::nullopt;
  uint32_t loads_finished = 0;
  uint64_t durable_step = 0;
};

// Says which votes, or nodes, are of one kind: those with equal numbers hold
// the same parameters. Empty: all are of one.
using Kinds = absl::Span<const uint32_t>;

// Returns whether nodes hold different parameters.
bool IsSplit(Kinds kinds);

// Returns what all do with a step that each rank's node has prepared, or taken
// already, or (nullopt) could not prepare: commit when all digests of a kind
// are equal, skip when moreover some node has found Inf or NaN, else abort.
// `kinds`: of each vote.
Verdict DecideVotes(absl::Span<const std::optional<NodeStep>> votes,
                    Kinds kinds = {});

// Returns, by node, the verdict that its prepared step gets now. Empty: all are
// at the same step, and none is prepared. Ask for the positions again after the
// verdicts are brought. The norm of kClip is NotedNorm().
//
// `positions`: by node; nullopt: it has no such job. `names`, `kinds`: of the
// nodes. FAILED_PRECONDITION: the nodes are at different steps and none can
// catch up; names each node's, and says how to go on.
absl::StatusOr<std::map<size_t, Verdict>> Resolve(
    absl::Span<const std::optional<NodePosition>> positions,
    absl::Span<const std::string> names, Kinds kinds = {});

// Returns the norm that some node has noted for the latest step of the nodes.
std::optional<NodesNorm> NotedNorm(
    absl::Span<const std::optional<NodePosition>> positions);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NODES_RESOLUTION_H_
