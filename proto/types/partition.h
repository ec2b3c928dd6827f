#ifndef OPTSTATE_PROTO_TYPES_PARTITION_H_
#define OPTSTATE_PROTO_TYPES_PARTITION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/types/layout.h"

namespace optstate {

// Values equal optstate.v1.PartitionMode.
enum class PartitionMode : uint8_t {
  kGreedy = 1,
  kContiguous = 2,
  // Every rank has every parameter; the engine sums their gradients.
  kReplicated = 3,
  // Parameters are shards, each of which has its owner.
  kLocal = 4,
};

// Elements [begin, begin + numel) of one parameter, owned by one rank.
struct Piece {
  uint32_t parameter = 0;
  uint64_t begin = 0;
  uint64_t numel = 0;
  // The offset in the gradient area at which the rank writes its gradient; a
  // multiple of kSegmentAlignBytes.
  uint64_t gradient_offset_bytes = 0;
};

// The pieces that one rank pushes and, except with kReplicated, owns. Client
// and engine both compute the partition, with equal results.
struct RankPartition {
  // The pieces by parameter, then begin; at most one piece a parameter. A
  // parameter without elements has one piece of numel 0, on exactly one rank
  // (replicated: on each).
  std::vector<Piece> pieces;
  uint64_t gradient_area_bytes = 0;

  // The index of the first piece whose parameter is >= `parameter`.
  size_t LowerBound(uint32_t parameter) const;
};

// Computes the partition. Greedy: group after group, whole parameters, largest
// first (ties: lower index first), each to the rank with the fewest elements so
// far in all groups (ties: lower rank), as torch's ZeroRedundancyOptimizer
// does; so an extension of the layout moves nothing. Contiguous: rank r owns
// tiles [T*r/W, T*(r+1)/W) of the flat space's T tiles. Replicated: all
// parameters, whole. Local: the shards that the rank owns.
// INVALID_ARGUMENT when rank >= world_size, world_size is not in [1,
// kWorldSizeMax], parameters are shards without Local or not shards with it, or
// a shard's owner is not below world_size.
absl::StatusOr<RankPartition> MakeRankPartition(const Layout& layout,
                                                PartitionMode mode,
                                                uint32_t world_size,
                                                uint32_t rank);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_PARTITION_H_
