#ifndef OPTSTATE_TESTS_SIMULATION_COLLECTIVE_H_
#define OPTSTATE_TESTS_SIMULATION_COLLECTIVE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/collective/nodes/resolution.h"
#include "proto/types/step_verdict.h"
#include "tests/simulation/simulated_network.h"
#include "tests/simulation/world.h"

namespace optstate::simulation {

// The rules by which the ranks of the C++ client decide.
using client::NodePosition;
using client::NodeStep;

// The part that one rank brings to an all-gather.
struct Contribution {
  bool failed = false;                   // the rank has an error
  std::optional<NodeStep> vote;          // about the step that it has prepared
  std::optional<NodePosition> position;  // of its node; by its first rank alone
  uint64_t facts = 0;                    // what must be equal on all ranks
};

// One all-gather: what all ranks of all nodes have brought, and what follows
// from that. It follows on each rank by itself in the real client; here it is
// found once, because it is a pure function of the same values.
class Round {
 public:
  Round(uint32_t members, uint32_t ranks)
      : members_(members), ranks_(ranks), of_ranks_(size_t{members} * ranks) {}

  void Bring(uint32_t member, uint32_t rank, Contribution contribution) {
    of_ranks_[size_t{member} * ranks_ + rank] = std::move(contribution);
  }
  bool any_failed() const;
  bool facts_are_equal() const;
  // The step that is voted about; 0: none.
  uint64_t vote_step() const {
    return of_ranks_.front().vote.value_or(NodeStep{}).step;
  }
  // The verdict about a step, from all ranks' votes.
  Verdict verdict() const;
  // The verdicts by member, from the positions of the first ranks.
  const absl::StatusOr<std::map<size_t, Verdict>>& resolution() const;
  const std::optional<NodePosition>& position(uint32_t member) const {
    return of_ranks_[size_t{member} * ranks_].position;
  }

 private:
  const uint32_t members_;
  const uint32_t ranks_;
  std::vector<Contribution> of_ranks_;
  mutable std::optional<Verdict> verdict_;
  mutable std::optional<absl::StatusOr<std::map<size_t, Verdict>>> resolution_;
};

// The process group of one generation of ranks: all-gathers over a binary tree
// of nodes. Ranks bring their part to the first rank of their node, nodes send
// theirs up the tree, and the root sends all down.
//
// When the processes of a node end, its neighbours in the tree notice the end
// of their connections and end too, and so on.
//
// Members are numbered from 0; member m is node `nodes[m]`, and the root is
// member 0. Threads: one at a time. Outlives all events that it has added.
class Collective {
 public:
  using Done = std::function<void(const Round&)>;

  // `world` and `network` outlive the object. `on_peer_lost` is called when a
  // member, of this number, has noticed that a neighbour has gone.
  Collective(World* world, SimulatedNetwork* network,
             std::vector<uint32_t> nodes, uint32_t ranks,
             std::function<void(uint32_t member)> on_peer_lost);
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // Brings a rank's part to its next all-gather; `done` is called with all
  // parts, unless the rank's node has ended by then. A rank makes its next call
  // after that.
  void Gather(uint32_t member, uint32_t rank, Contribution contribution,
              Done done);

  // The member's processes have ended. `notice`: until a neighbour sees it.
  void End(uint32_t member, const DrawnTime& notice);
  bool has_ended(uint32_t member) const { return members_[member].has_ended; }

  uint32_t size() const { return static_cast<uint32_t>(members_.size()); }
  uint32_t node(uint32_t member) const { return nodes_[member]; }
  // The number of all-gathers whose result the root has had.
  uint64_t rounds() const { return rounds_completed_; }
  // The number of those in which ranks voted about a step.
  uint64_t vote_rounds() const { return vote_rounds_; }
  // Called when the root has the result of an all-gather, before it sends it.
  void set_on_result(std::function<void(const Round&)> on_result) {
    on_result_ = std::move(on_result);
  }

 private:
  static constexpr uint32_t kFanOut = 2;
  // The bytes of a contribution on the wire: six numbers, as the client sends.
  static constexpr uint64_t kContributionBytes = 48;

  struct Gathering {
    uint32_t ranks_there = 0;
    uint32_t children_there = 0;
    std::vector<Done> waiting;  // by rank
  };
  struct Member {
    bool has_ended = false;
    std::vector<uint64_t> next_round;         // by rank
    std::map<uint64_t, Gathering> gathering;  // by round
  };
  struct OpenRound {
    Round round;
    uint32_t delivered = 0;  // to members
  };

  std::vector<uint32_t> ChildrenOf(uint32_t member) const;
  uint32_t SubtreeSize(uint32_t member) const;
  OpenRound& RoundOf(uint64_t number);
  void SendUpIfComplete(uint32_t member, uint64_t number);
  void Deliver(uint32_t member, uint64_t number);

  World& world_;
  SimulatedNetwork& network_;
  const std::vector<uint32_t> nodes_;
  const uint32_t ranks_;
  const std::function<void(uint32_t)> on_peer_lost_;
  std::function<void(const Round&)> on_result_;
  std::vector<Member> members_;
  std::vector<uint32_t> subtree_sizes_;
  std::map<uint64_t, std::shared_ptr<OpenRound>> rounds_;
  uint64_t rounds_completed_ = 0;
  uint64_t vote_rounds_ = 0;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_COLLECTIVE_H_
