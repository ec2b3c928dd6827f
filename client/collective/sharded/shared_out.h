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
#include "client/collective/sharded/ownership.h"

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
//   auto shared = SharedOut::Make(&collective, places, layout, how);
//   shared->Place(&options);             // the session of this rank's share
//   auto session = Session::Open(options);
//   shared->Agree(session.status());
//   shared->CheckAttached(**session);
//   ... BeginLoad, Load() below, FinishLoad, if the phase is kLoading; else
//   shared->Spread(**session, parameters);
//   for each step: shared->Step(**session, commit, gradients, parameters);
//
// Results: parameters and state have the bits of one node that is given the
// reduced gradients. An Inf or NaN at any owner skips the step at all.
//
// Not covered: clipping by norms, which each daemon knows of its own share
// alone (UNIMPLEMENTED: CommitOptions::max_norm, Hyperparams::max_norm; clip
// gradients before Step(), or take the Python package's
// across_nodes="sharded"). Steps are of one phase: a rank that dies while its
// daemon and others commit may leave nodes one step apart. CheckAttached()
// refuses them then: delete the job on all nodes, and go on from a checkpoint.
//
// Errors are those of Session and Collective, on every rank alike.
// Threads: one at a time. Collective, in the same order on all ranks: Make(),
// Agree(), CheckAttached(), Step() and Spread().
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

  // Sets the options that the share decides: layout, partition, rank,
  // world_size and local_world_size.
  void Place(SessionOptions* options) const;

  // Returns OK when no rank has an error, else an error on every rank.
  absl::Status Agree(const absl::Status& mine);

  // Checks that all ranks have attached to jobs of one phase and step.
  // FAILED_PRECONDITION names the first difference and the rank.
  // INVALID_ARGUMENT: the session is not of this share.
  absl::Status CheckAttached(const Session& session);

  // Loads this rank's part of an array of a whole parameter; see Session::Load.
  // `parameter`: in the layout of all.
  absl::Status Load(Session& session, StateArray array, uint32_t parameter,
                    DType dtype, absl::Span<const std::byte> data);

  // Takes a step with the gradients of all ranks, and copies the updated
  // parameters to `parameters` when it was applied.
  //
  // `gradients`, `parameters`: of the layout of all, whole, in their own
  // dtypes. `has_gradient`: null, or by parameter whether this rank has one; a
  // gradient that all lack is no gradient, which updates nothing. After an
  // error that came before the commit nothing is staged, and the step may be
  // taken again.
  absl::StatusOr<Outcome> Step(
      Session& session, CommitOptions commit,
      absl::Span<const absl::Span<const std::byte>> gradients,
      absl::Span<const absl::Span<std::byte>> parameters,
      const std::vector<bool>* has_gradient = nullptr);

  // Copies all parameters, as of the committed step, from their owners to
  // `parameters`.
  absl::Status Spread(Session& session,
                      absl::Span<const absl::Span<std::byte>> parameters);

 private:
  SharedOut(Collective* collective, const Places& places, LayoutSpec layout,
            const SharedOutOptions& options);

  static absl::StatusOr<std::unique_ptr<SharedOut>> MakeMine(
      Collective* collective, const Places& places, LayoutSpec layout,
      const SharedOutOptions& options);
  absl::Status CheckAlike() const;
  absl::Status CheckNumbers(absl::Span<const uint64_t> mine,
                            absl::Span<const std::string> names,
                            absl::string_view then) const;
  absl::Status CheckParameters(
      const Session& session,
      absl::Span<const absl::Span<std::byte>> parameters) const;
  absl::Status CheckStep(
      const Session& session, const CommitOptions& commit,
      absl::Span<const absl::Span<const std::byte>> gradients,
      absl::Span<const absl::Span<std::byte>> parameters,
      const std::vector<bool>* has_gradient) const;
  // Makes has_any_ that of any rank.
  absl::Status ShareHasGradient();
  // Adds up the gradients of all ranks at their owners.
  absl::Status Reduce(absl::Span<const absl::Span<const std::byte>> gradients);
  // Fills sums_ with this rank's gradients at [begin, begin + size) of each
  // rank's share, one rank after the other.
  void Pack(absl::Span<const absl::Span<const std::byte>> gradients,
            uint64_t begin, uint64_t size);
  absl::Status ScatterSums(uint64_t size);
  // Writes the sums of this rank's share at [begin, begin + size) to reduced_.
  void Unpack(uint64_t begin, uint64_t size);
  absl::Status Push(Session& session, uint64_t step);
  const Share& mine() const { return shares_[collective_.rank()]; }

  Collective& collective_;
  const Places places_;
  const LayoutSpec layout_;
  const SharedOutOptions options_;
  std::vector<Share> shares_;       // by rank, in elements
  std::vector<Share> byte_shares_;  // by rank, in bytes of parameters
  uint64_t longest_elements_ = 0;   // of any rank's share
  uint64_t longest_bytes_ = 0;
  LayoutSpec node_layout_;
  std::string node_hash_;
  // By part of this rank's share: its place in node_layout_, and its gradient.
  std::vector<uint32_t> node_parameters_;
  std::vector<std::vector<std::byte>> reduced_;

  // The step under way has these.
  std::vector<bool> has_mine_;
  std::vector<bool> has_any_;
  bool found_inf_ = false;
  std::vector<float> sums_;
  std::vector<float> scattered_;
  std::vector<uint16_t> halves_;
  std::vector<uint16_t> scattered_halves_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SHARED_OUT_H_
