#ifndef OPTSTATE_TESTS_SIMULATION_MUTATION_H_
#define OPTSTATE_TESTS_SIMULATION_MUTATION_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace optstate::simulation {

// Ways of breaking the protocol by which nodes take a step together. Simulated
// nodes have one on request, so that a test sees that a scenario finds it.
enum class Mutation : uint8_t {
  kNone,
  // A rank decides by what its own node has prepared.
  kDecidesAlone,
  // A rank brings the decision about the step before.
  kDecidesAboutTheLastStep,
  // A rank brings a skip as a commit.
  kBringsSkipsAsCommits,
  // A rank goes on without bringing the decision to its engine.
  kBringsNoDecision,
  // An engine does not write a decision down: the next one finds the job as it
  // was before the last decision.
  kForgetsDecisions,
  // An engine forgets, as it starts, the step that the last one has prepared.
  kForgetsPreparedSteps,
  // Ranks that settle drop a step that other nodes have taken.
  kDropsWhatOthersTook,
};

struct MutationInfo {
  Mutation mutation = Mutation::kNone;
  absl::string_view name;
  // The scenario that finds it.
  absl::string_view scenario;
};

// All but kNone.
absl::Span<const MutationInfo> Mutations();

// Returns the mutation of this name. INVALID_ARGUMENT: there is none; names
// them.
absl::StatusOr<Mutation> MutationNamed(absl::string_view name);

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_MUTATION_H_
