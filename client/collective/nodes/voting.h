#ifndef OPTSTATE_CLIENT_COLLECTIVE_NODES_VOTING_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NODES_VOTING_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/collective/collective.h"
#include "client/collective/nodes/places.h"
#include "client/collective/nodes/resolution.h"
#include "client/session_types.h"

namespace optstate::client {

// By rank: what its node has prepared, or taken already; nullopt: it could not
// prepare the step.
using Votes = std::vector<std::optional<NodeStep>>;

// Returns the step of an outcome, without a norm.
NodeStep StepOf(const Outcome& outcome);

// Exchanges what this rank's node has prepared, or why it has not. `loaded`:
// what the digests of ranks have to agree in besides. Collective: one
// all-gather of 32 bytes a rank.
absl::StatusOr<Votes> GatherVotes(Collective& collective,
                                  const absl::StatusOr<Outcome>& prepared,
                                  uint64_t loaded);

// Returns the error of a rank that has voted, or was about to, and does not
// know what all have decided, for this reason: UNAVAILABLE, with what to do,
// when the step is prepared on its node.
absl::Status UndecidedError(const absl::StatusOr<Outcome>& prepared,
                            const absl::Status& why);

// Returns the error of ranks whose votes differ, which names what each node has
// prepared. The step is taken on none.
absl::Status DifferenceError(const Places& places, const Votes& votes);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NODES_VOTING_H_
