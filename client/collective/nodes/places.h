#ifndef OPTSTATE_CLIENT_COLLECTIVE_NODES_PLACES_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NODES_PLACES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace optstate::client {

// Returns a name of this node that differs between nodes: $OPTSTATE_NODE, else
// the kernel's boot id, which all containers of a machine share.
// FAILED_PRECONDITION: there is neither.
absl::StatusOr<std::string> NodeName();

// This rank's place on its node, and the nodes of all ranks.
//
// Immutable, so safe to share between threads.
class Places {
 public:
  // `names`: of the node, by rank. INVALID_ARGUMENT: nodes have unequally many
  // ranks.
  static absl::StatusOr<Places> Make(std::vector<std::string> names,
                                     uint32_t rank);

  // Names of the nodes, in the order of their first ranks.
  const std::vector<std::string>& nodes() const { return nodes_; }
  // The first rank on each node, in the order of nodes().
  const std::vector<uint32_t>& first_ranks() const { return first_ranks_; }
  // The name of a rank's node.
  const std::string& name_of(uint32_t rank) const { return names_[rank]; }
  // The place of this rank's node in nodes().
  size_t node() const { return node_; }
  const std::string& node_name() const { return nodes_[node_]; }
  uint32_t local_rank() const { return local_rank_; }
  uint32_t local_world_size() const { return local_world_size_; }
  bool is_first_rank() const { return local_rank_ == 0; }

 private:
  Places() = default;

  std::vector<std::string> names_;  // by rank
  std::vector<std::string> nodes_;
  std::vector<uint32_t> first_ranks_;
  size_t node_ = 0;
  uint32_t local_rank_ = 0;
  uint32_t local_world_size_ = 1;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NODES_PLACES_H_
