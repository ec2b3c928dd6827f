#ifndef OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SHARED_OUT_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SHARED_OUT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/collective/collective.h"
#include "client/collective/gradients/gradient_reducer.h"
#include "client/collective/nodes/places.h"
#include "client/collective/nodes/resolution.h"
#include "client/collective/sharded/gradient_norm.h"
#include "client/collective/sharded/gradient_scatter.h"
#include "client/collective/sharded/ownership.h"
#include "client/collective/sharded/split_agreement.h"
#include "proto/types/layout.h"

namespace optstate::client {

// How ranks share out parameters, equal on all of them.
struct SharedOutOptions {
  // kGreedy: whole parameters, as even as their sizes allow. kContiguous: cuts
  // parameters, so that all ranks own nearly as much; with optimizers that
  // update each element by itself.
  PartitionMode ownership = PartitionMode::kGreedy;
  // Options of the gradients; quantisation is refused.
  ReducerOptions reduction;
};

// Parameters that the ranks of several nodes share out, as ZeRO-1 does with
// optimizer state: each has one owner, whose node's daemon keeps its state and
// updates it. Gradients are added up at their owner (reduce-scatter), and the
// updated parameters go to all ranks (all-gather). So the daemons of N nodes
// keep and update an N-th each.
//
//   auto shared = SharedOut::Make(&collective, node_name, layout, how);
//   shared->Place(&options);             // the session of this rank's share
//   shared->Settle(options);             // before any rank attaches
//   auto session = Session::Open(options);
//   shared->Agree(session.status());
//   shared->CheckAttached(**session);
//   ... BeginLoad, Load() below, FinishLoad, if the phase is kLoading; else
//   shared->Spread(**session, parameters);
//   for each step: shared->Step(**session, commit, gradients, parameters);
//
// Results: parameters, state, norm and clip coefficient have the bits of one
// node that is given the reduced gradients, unsharded. An Inf or NaN at any
// owner skips the step on all nodes. (A single node's daemon finds the norm of
// its shards by itself: with kContiguous its last bit may be another one.)
//
// A step is taken on all nodes or on none, whichever process dies: in two
// phases, as NodeAgreement takes it, with one round more (SplitAgreement).
// Settle() of the ranks that are started next brings the decision to nodes that
// lack it.
//
// Not covered, and refused with UNIMPLEMENTED: Hyperparams::max_norm of a group
// on several nodes, because each daemon knows the norm of its own shares alone;
// quantised gradients; speculation. Nodes' jobs of one name that are of two
// runs, and are at one step, are not told apart: delete a job on all nodes.
//
// Errors are those of Session and Collective, on every rank alike. Besides,
//   FAILED_PRECONDITION  ranks or nodes differ; or it is not known what all
//                        nodes decided about the last step: says what to do
//   UNAVAILABLE          a step is prepared here whose decision this rank does
//                        not know, since the other ranks are gone: start all
//                        ranks again, which settles it
// Threads: one at a time. Collective, in the same order on all ranks: Make(),
// Settle(), Agree(), CheckAttached(), Step() and Spread().
class SharedOut {
 public:
  // `collective`: over host memory, of all ranks of all nodes; it outlives the
  // object. `layout`: of all parameters, none of which is a shard.
  // INVALID_ARGUMENT, UNIMPLEMENTED: such a layout cannot be shared out so.
  // FAILED_PRECONDITION: ranks name different layouts or options; says the
  // first difference and the rank.
  static absl::StatusOr<std::unique_ptr<SharedOut>> Make(
      Collective* collective, const Places& places, LayoutSpec layout,
      const SharedOutOptions& options);

  // Finds the places of all ranks by itself; `node`: see NodeName().
  // INVALID_ARGUMENT: nodes have unequally many ranks.
  static absl::StatusOr<std::unique_ptr<SharedOut>> Make(
      Collective* collective, const std::string& node, LayoutSpec layout,
      const SharedOutOptions& options);

  const Places& places() const { return places_; }

  // Sets the options that the share decides: layout, partition, rank,
  // world_size, local_world_size and two_phase.
  void Place(SessionOptions* options) const;

  // Brings all nodes to one step. `options`: those of the session that is to be
  // opened, after Place(). FAILED_PRECONDITION: the nodes cannot be brought to
  // one step, or ranks ask for different jobs. UNIMPLEMENTED: see above.
  // ABORTED: other ranks still take steps of the job.
  absl::Status Settle(const SessionOptions& options);

  // Returns OK when no rank has an error, else an error on every rank.
  absl::Status Agree(const absl::Status& mine);

  // Checks that all ranks have attached to jobs of one phase, step and loss
  // scale. FAILED_PRECONDITION names the first difference and the rank.
  // INVALID_ARGUMENT: the session is not of this share.
  absl::Status CheckAttached(const Session& session);

  // Loads this rank's part of an array of a whole parameter; see Session::Load.
  // `parameter`: in the layout of all.
  absl::Status Load(Session& session, StateArray array, uint32_t parameter,
                    DType dtype, absl::Span<const std::byte> data);

  // Takes a step with the gradients of all ranks, on all nodes or on none, and
  // copies the updated parameters to `parameters` when it was applied.
  //
  // `commit`: equal on all ranks, found_inf aside. `gradients`, `parameters`:
  // of the layout of all, whole, in their own dtypes. `has_gradient`: null, or
  // by parameter whether this rank has one; a gradient that all lack is no
  // gradient, which updates nothing.
  //
  // CANCELLED, with info().commit_open: this rank's wait was interrupted, and
  // it has not voted; the other ranks wait for it. Call Step() with the same
  // arguments again. After another error that is a rank's own the step is taken
  // on none, and may be taken again, unless a daemon did not answer: then the
  // next call is FAILED_PRECONDITION, and says what to do.
  absl::StatusOr<Outcome> Step(
      Session& session, const CommitOptions& commit,
      absl::Span<const absl::Span<const std::byte>> gradients,
      absl::Span<const absl::Span<std::byte>> parameters,
      const std::vector<bool>* has_gradient = nullptr);

  // Copies all parameters, as of the committed step, from their owners to
  // `parameters`.
  absl::Status Spread(Session& session,
                      absl::Span<const absl::Span<std::byte>> parameters);

 private:
  // `whole`: of `layout`.
  SharedOut(Collective* collective, const Places& places, LayoutSpec layout,
            Layout whole, const SharedOutOptions& options,
            std::vector<Share> shares);

  static absl::StatusOr<std::unique_ptr<SharedOut>> MakeMine(
      Collective* collective, const Places& places, LayoutSpec layout,
      const SharedOutOptions& options);
  absl::Status CheckAlike() const;
  absl::Status CheckNumbers(absl::Span<const uint64_t> mine,
                            absl::Span<const std::string> names,
                            absl::string_view then) const;
  // Returns the error of ranks that differ in a text, if they do. Collective.
  absl::Status CheckText(absl::string_view mine, absl::string_view before,
                         absl::string_view then) const;
  absl::Status CheckParameters(
      const Session& session,
      absl::Span<const absl::Span<std::byte>> parameters) const;
  absl::Status CheckStep(
      const Session& session, const CommitOptions& commit,
      absl::Span<const absl::Span<const std::byte>> gradients,
      absl::Span<const absl::Span<std::byte>> parameters,
      const std::vector<bool>* has_gradient) const;
  // Does everything of a step that comes before its commit.
  absl::Status Stage(Session& session, const CommitOptions& commit,
                     absl::Span<const absl::Span<const std::byte>> gradients,
                     absl::Span<const absl::Span<std::byte>> parameters,
                     const std::vector<bool>* has_gradient);
  // Makes has_any_ that of any rank.
  absl::Status ShareHasGradient();
  // Finds the norm of all nodes' gradients, and the clip coefficient.
  absl::Status FindNorm(const CommitOptions& commit);
  // Returns how this rank's daemon is to prepare the step.
  CommitOptions ToPrepare(const CommitOptions& commit) const;
  absl::Status Push(Session& session, uint64_t step);
  const Share& mine() const { return shares_[collective_.rank()]; }

  Collective& collective_;
  const Places places_;
  const LayoutSpec layout_;
  const Layout whole_;  // of layout_
  const SharedOutOptions options_;
  const std::vector<Share> shares_;  // by rank, in elements
  std::vector<Share> byte_shares_;   // by rank, in bytes of parameters
  uint64_t longest_bytes_ = 0;       // of any rank's share
  LayoutSpec node_layout_;
  std::string node_hash_;
  // By part of this rank's share: its place in node_layout_.
  std::vector<uint32_t> node_parameters_;
  GradientScatter scatter_;
  const GradientNorm gradient_norm_;
  SplitAgreement agreement_;

  // The step under way has these.
  std::vector<bool> has_mine_;
  std::vector<bool> has_any_;
  NodesNorm norm_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SHARED_OUT_H_
