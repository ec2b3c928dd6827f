#ifndef OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SPLIT_AGREEMENT_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SPLIT_AGREEMENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/collective/collective.h"
#include "client/collective/nodes/places.h"
#include "client/collective/nodes/resolution.h"
#include "client/collective/nodes/voting.h"

namespace optstate::client {

// Takes each step on all nodes or on none, whoever dies when, where every node
// holds parameters of its own: what NodeAgreement does for nodes that hold the
// same, by the same rules, in one round more.
//
//   1. Every rank has its daemon prepare the step, without a maximum norm.
//   2. Ranks exchange what was prepared, and find the same verdict.
//   3. To commit, every rank has its daemon note the norm of all nodes'
//      gradients and the clip coefficient (Verdict::kClip). The step stays
//      prepared.
//   4. When all ranks have said that it is noted, they have their daemons
//      commit.
//
// So a step that no node has noted can be committed nowhere, and Settle() of
// the ranks that are started next drops it; and where one has noted it, the
// others get norm and step from there.
//
// Digests say nothing about steps of nodes that hold different parameters.
// Steps of one number belong together because no rank prepares a step again
// before it knows that every node has dropped the last attempt: after an error
// that leaves this open, CheckDecided() refuses all further steps.
//
// On a single node this is a step in two phases, which its daemon clips.
//
// Threads: one at a time. Collective: Settle() and Take().
class SplitAgreement {
 public:
  // Both outlive the object.
  SplitAgreement(Collective* collective, const Places* places);

  // Returns whether there are several nodes.
  bool is_split() const { return IsSplit(kinds_); }

  // Brings all nodes to one step, before any rank attaches; see SettleNodes().
  absl::Status Settle(const SessionOptions& options);

  // FAILED_PRECONDITION: it is not known here what all nodes have decided about
  // the last step.
  absl::Status CheckDecided(const Session& session);

  // Takes the step on all nodes or on none. `prepared`: the answer of this
  // rank's daemon to the commit of a session with two_phase, or why there is
  // none. `norm`: of all nodes' gradients, equal on all ranks; unused on a
  // single node. The outcome is the step's, with this norm.
  //
  // After an error that is this rank's or another's own, from before all had
  // prepared the step, it is taken on none and may be taken again.
  absl::StatusOr<Outcome> Take(Session& session,
                               const absl::StatusOr<Outcome>& prepared,
                               const NodesNorm& norm);

 private:
  // Has every node note the norm for the step that all have prepared, and
  // returns the outcome with it. An error, on every rank: not all have.
  absl::StatusOr<Outcome> NoteNorm(Session& session, const Outcome& prepared,
                                   const NodesNorm& norm);
  // Drops the step on all nodes; returns why.
  absl::Status Drop(Session& session, const absl::StatusOr<Outcome>& prepared,
                    const Votes& votes);

  Collective& collective_;
  const Places& places_;
  std::vector<uint32_t> kinds_;           // by node: each is one of its own
  std::vector<uint32_t> kinds_of_ranks_;  // by rank, that of its node
  // The step whose verdict this rank may not know, or could not bring; 0: none.
  uint64_t undecided_ = 0;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SPLIT_AGREEMENT_H_
