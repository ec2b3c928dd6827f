#include "proto/types/shard.h"

#include <cstddef>

#include "absl/strings/str_cat.h"

namespace optstate {
namespace {

constexpr char kSeparator = '@';

}  // namespace

std::string ShardName(absl::string_view global_name, uint32_t owner) {
  return absl::StrCat(global_name, std::string(1, kSeparator), owner);
}

absl::string_view GlobalName(absl::string_view shard_name) {
  // The global name may have separators of its own; the owner has none.
  return shard_name.substr(0, shard_name.rfind(kSeparator));
}

absl::Status CheckShard(absl::string_view name, absl::Span<const int64_t> shape,
                        const Shard& shard) {
  if (shard.owner >= kWorldSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the shard's owner is rank ", shard.owner,
                     "; ranks are below ", kWorldSizeMax));
  }
  const absl::string_view global_name = GlobalName(name);
  if (global_name.empty() || name != ShardName(global_name, shard.owner)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the name of a shard of rank ", shard.owner,
        " must be the global tensor's, \"@\" and \"", shard.owner, "\""));
  }
  if (shard.global_shape.size() != shape.size() ||
      shard.offset.size() != shape.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the shard has ", shape.size(), " dimensions, its global shape ",
        shard.global_shape.size(), ", its offset ", shard.offset.size()));
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    // No operand is negative where they are subtracted, so nothing overflows.
    if (shape[d] >= 0 && shard.offset[d] >= 0 &&
        shape[d] <= shard.global_shape[d] &&
        shard.offset[d] <= shard.global_shape[d] - shape[d]) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("dimension ", d, " of the shard has ", shape[d],
                     " elements from ", shard.offset[d],
                     " on, and its global tensor has ", shard.global_shape[d]));
  }
  return absl::OkStatus();
}

bool ShardsOverlap(absl::Span<const int64_t> one_shape, const Shard& one,
                   absl::Span<const int64_t> other_shape, const Shard& other) {
  for (size_t d = 0; d < one_shape.size(); ++d) {
    if (one.offset[d] + one_shape[d] <= other.offset[d] ||
        other.offset[d] + other_shape[d] <= one.offset[d]) {
      return false;
    }
    // A shard without elements may lie within another's range.
    if (one_shape[d] == 0 || other_shape[d] == 0) return false;
  }
  return true;
}

}  // namespace optstate
