#ifndef OPTSTATE_PROTO_TYPES_SHARD_H_
#define OPTSTATE_PROTO_TYPES_SHARD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace optstate {

inline constexpr uint32_t kWorldSizeMax = 1024;

// The part of a larger, global tensor that a parameter of a layout is, when the
// ranks shard the model themselves (PartitionMode::kLocal): the block of the
// parameter's shape that begins at `offset`. A tensor that is not cut is one
// shard.
struct Shard {
  uint32_t owner = 0;  // the rank that pushes its gradients and loads it
  std::vector<int64_t> global_shape;
  std::vector<int64_t> offset;

  bool operator==(const Shard&) const = default;
};

// Returns the layout's name of the shard of a global tensor that a rank owns:
// "w@3". A rank owns at most one shard of a tensor, so the names of a layout
// are unique when those of its global tensors are.
std::string ShardName(absl::string_view global_name, uint32_t owner);

// Returns the global tensor's name, whatever it contains, of a name that
// ShardName() made.
absl::string_view GlobalName(absl::string_view shard_name);

// Returns INVALID_ARGUMENT when a shard is not named for its owner, or `shape`
// at its offset is not within its global tensor, or the owner is not below
// kWorldSizeMax.
absl::Status CheckShard(absl::string_view name, absl::Span<const int64_t> shape,
                        const Shard& shard);

// Returns whether two shards of one global tensor have a common element.
bool ShardsOverlap(absl::Span<const int64_t> one_shape, const Shard& one,
                   absl::Span<const int64_t> other_shape, const Shard& other);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_SHARD_H_
