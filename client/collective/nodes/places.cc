#include "client/collective/nodes/places.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace optstate::client {

absl::StatusOr<std::string> NodeName() {
  const char* const chosen = std::getenv("OPTSTATE_NODE");
  if (chosen != nullptr && *chosen != '\0') return std::string(chosen);
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string name;
  std::getline(file, name);
  name = std::string(absl::StripAsciiWhitespace(name));
  if (!name.empty()) return name;
  return absl::FailedPreconditionError(
      "the kernel does not say its boot id: name this node in $OPTSTATE_NODE");
}

absl::StatusOr<Places> Places::Make(std::vector<std::string> names,
                                    uint32_t rank) {
  Places places;
  places.names_ = std::move(names);
  std::vector<uint32_t> counts;  // by node
  for (uint32_t each = 0; each < places.names_.size(); ++each) {
    const std::string& name = places.names_[each];
    const auto found =
        std::find(places.nodes_.begin(), places.nodes_.end(), name);
    const auto node = static_cast<size_t>(found - places.nodes_.begin());
    if (found == places.nodes_.end()) {
      places.nodes_.push_back(name);
      places.first_ranks_.push_back(each);
      counts.push_back(0);
    }
    if (each == rank) {
      places.node_ = node;
      places.local_rank_ = counts[node];
    }
    ++counts[node];
  }
  places.local_world_size_ = counts[places.node_];
  for (size_t node = 0; node < counts.size(); ++node) {
    if (counts[node] == counts[0]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("nodes of one job have equally many ranks, but ",
                     places.nodes_[0], " has ", counts[0], " and ",
                     places.nodes_[node], " has ", counts[node]));
  }
  return places;
}

}  // namespace optstate::client
