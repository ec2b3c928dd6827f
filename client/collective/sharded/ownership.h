#ifndef OPTSTATE_CLIENT_COLLECTIVE_SHARDED_OWNERSHIP_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SHARDED_OWNERSHIP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"

namespace optstate::client {

// Units [begin, begin + count) of one parameter, which one rank owns. They are
// at `place` when all that the rank owns lies one after the other.
struct OwnedPart {
  uint32_t parameter = 0;
  uint64_t begin = 0;
  uint64_t count = 0;
  uint64_t place = 0;
};

// All that one rank owns, by parameter, in units of elements or bytes.
class Share {
 public:
  // Sets the places. `parts`: by parameter, at most one of each.
  explicit Share(std::vector<OwnedPart> parts);

  const std::vector<OwnedPart>& parts() const { return parts_; }
  uint64_t size() const { return size_; }
  // Returns the index in parts() of this parameter's part; parts().size(): the
  // rank owns nothing of it.
  size_t IndexOf(uint32_t parameter) const;

  // Calls visit(index, at, count, offset) for the parts, or what of them, that
  // lie at [begin, end): index is in parts(), `at` counts within the parameter,
  // and offset from `begin`.
  template <typename Visitor>
  void Visit(uint64_t begin, uint64_t end, const Visitor& visit) const {
    auto part = std::partition_point(parts_.begin(), parts_.end(),
                                     [begin](const OwnedPart& each) {
                                       return each.place + each.count <= begin;
                                     });
    for (; part != parts_.end() && part->place < end; ++part) {
      const uint64_t from = std::max(begin, part->place);
      const uint64_t to = std::min(end, part->place + part->count);
      visit(static_cast<size_t>(part - parts_.begin()),
            part->begin + (from - part->place), to - from, from - begin);
    }
  }

 private:
  std::vector<OwnedPart> parts_;
  uint64_t size_ = 0;
};

// Shares out the elements of all parameters among ranks, as the ranks of one
// node share them out (MakeRankPartition): kGreedy by whole parameters,
// kContiguous by runs of tiles, which cut parameters. Every element has one
// owner. INVALID_ARGUMENT: as MakeRankPartition.
absl::StatusOr<std::vector<Share>> MakeShares(const Layout& layout,
                                              PartitionMode mode,
                                              uint32_t ranks);

// Returns the share in bytes of the parameters' own dtypes.
Share InBytes(const Share& share, const LayoutSpec& layout);

// Returns the layout of a node's job, for PartitionMode::kLocal: a shard for
// each part that one of the node's ranks owns, and in the place of a parameter
// of which they own nothing one without elements, so that the groups stay.
// `shares`: of the node's ranks, in their order.
LayoutSpec MakeNodeLayout(const LayoutSpec& layout,
                          absl::Span<const Share* const> shares);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SHARDED_OWNERSHIP_H_
