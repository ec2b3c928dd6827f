#ifndef OPTSTATE_CLIENT_COLLECTIVE_NODES_NODE_AGREEMENT_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NODES_NODE_AGREEMENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/collective/collective.h"
#include "client/collective/nodes/places.h"

namespace optstate::client {

// Brings the nodes of a job to one step, and takes each step on all of them or
// on none, whoever dies when. Every node has a daemon with a job that holds all
// parameters; ranks of all nodes reduce their gradients (GradientReducer), so
// that all daemons take the same steps.
//
//   auto agreement = NodeAgreement::Make(&collective, node_name);
//   agreement->Place(&options);        // rank, world_size, two_phase
//   agreement->Settle(options);        // before any rank attaches
//   auto session = Session::Open(options);
//   agreement->Agree(session.status());
//   agreement->CheckAttached(**session);
//   ... load, if the phase is kLoading: every rank the same values; NoteLoad
//   for each step: reduce, push,
//     agreement->Take(**session, commit)   // in the place of Session::Commit
//
// How a step is taken: every rank has its daemon prepare it (Session::Commit of
// a session with two_phase), ranks exchange what was prepared (one all-gather
// of 32 bytes a rank), each finds the same verdict (DecideVotes), and tells its
// daemon (Session::Decide). A rank that dies in between leaves a step that some
// nodes have prepared and others have taken. Settle() of the ranks that are
// started next brings the decision, by the same rule, so the step is applied
// once on every node, or on none.
//
// Not covered, and refused with UNIMPLEMENTED: nodes that hold different shards
// (their daemons would clip by different norms; see SharedOut), several jobs
// that clip by one norm (the Python package has them), speculation, and sums of
// ranks or micro-steps by the daemon.
//
// Errors: as Session's and Collective's, on every rank. Besides,
//   FAILED_PRECONDITION  nodes differ: in their jobs, their steps, or what they
//                        have prepared; names the nodes, and what to do
//   UNAVAILABLE          a step is prepared here whose decision this rank does
//                        not know, since the other ranks are gone: start all
//                        ranks again, which settles it
//
// Threads: one at a time. Collective, in the same order on all ranks: Make(),
// Settle(), Agree(), CheckAttached() and Take().
class NodeAgreement {
 public:
  // `collective`: over host memory, of all ranks of all nodes; it outlives the
  // agreement. `node`: see NodeName(). INVALID_ARGUMENT: nodes have unequally
  // many ranks, or the collective is one of device memory.
  static absl::StatusOr<std::unique_ptr<NodeAgreement>> Make(
      Collective* collective, const std::string& node);

  const Places& places() const { return places_; }

  // Sets the options that this rank's place decides: rank, world_size,
  // local_world_size and two_phase.
  void Place(SessionOptions* options) const;

  // Brings all nodes to one step. `options`: those of the session that is to be
  // opened, after Place(). FAILED_PRECONDITION: they cannot be, or ranks ask
  // for different jobs. UNIMPLEMENTED: see above. ABORTED: other ranks still
  // take steps of the job.
  absl::Status Settle(const SessionOptions& options);

  // Returns OK when no rank has an error, else an error on every rank.
  absl::Status Agree(const absl::Status& mine);

  // Checks that all ranks have attached to jobs of one phase, step, layout,
  // loss scale and, unless they are still to be loaded, parameters.
  absl::Status CheckAttached(Session& session);

  // Notes what this rank has loaded with Session::Load(), in order. The votes
  // compare it: nodes that load other values would step from other states for
  // ever.
  void NoteLoad(StateArray array, uint32_t parameter,
                absl::Span<const std::byte> data);

  // Takes a step on all nodes or on none; gradients have been pushed. The
  // outcome is the step's: of a step that another node has found Inf or NaN in,
  // it is not applied. `read`: as Session::Commit has it, filled when the step
  // is applied.
  //
  // CANCELLED: this rank's wait was interrupted, and it has not voted; the
  // other ranks wait for it. Call Take() with the same options again. After any
  // other error that is this rank's or another's own, the step is taken on
  // none, and may be pushed and taken again.
  absl::StatusOr<Outcome> Take(Session& session, const CommitOptions& options,
                               const ParameterTargets& read = {});

 private:
  NodeAgreement(Collective* collective, Places places);

  absl::Status CheckNumbers(absl::Span<const uint64_t> mine,
                            absl::Span<const std::string> names);

  Collective& collective_;
  const Places places_;
  uint64_t loaded_ = 0;  // identifies what this rank has loaded
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NODES_NODE_AGREEMENT_H_
