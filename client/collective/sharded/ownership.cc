#include "client/collective/sharded/ownership.h"

#include <utility>

#include "proto/types/dtype.h"
#include "proto/types/shard.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// A whole parameter keeps its shape, which some optimizers need. A part of one
// is a run of its elements, one after the other.
ParameterSpec ShardOf(const ParameterSpec& whole, const OwnedPart& part,
                      uint32_t owner) {
  ParameterSpec shard = whole;
  shard.name = ShardName(whole.name, owner);
  if (part.count == static_cast<uint64_t>(whole.numel)) {
    shard.shard = Shard{.owner = owner,
                        .global_shape = whole.shape,
                        .offset = std::vector<int64_t>(whole.shape.size(), 0)};
    return shard;
  }
  shard.numel = static_cast<int64_t>(part.count);
  shard.shape = {shard.numel};
  shard.shard = Shard{.owner = owner,
                      .global_shape = {whole.numel},
                      .offset = {static_cast<int64_t>(part.begin)}};
  return shard;
}

ParameterSpec Elsewhere(const ParameterSpec& whole) {
  ParameterSpec none = whole;
  none.name = ShardName(whole.name, /*owner=*/0);
  none.numel = 0;
  if (none.shape.empty()) {
    none.shape = {0};
  } else if (whole.numel != 0) {
    none.shape[0] = 0;
  }
  none.shard = Shard{.owner = 0,
                     .global_shape = none.shape,
                     .offset = std::vector<int64_t>(none.shape.size(), 0)};
  return none;
}

}  // namespace

Share::Share(std::vector<OwnedPart> parts) : parts_(std::move(parts)) {
  for (OwnedPart& each : parts_) {
    each.place = size_;
    size_ += each.count;
  }
}

size_t Share::IndexOf(uint32_t parameter) const {
  const auto found = std::partition_point(parts_.begin(), parts_.end(),
                                          [parameter](const OwnedPart& each) {
                                            return each.parameter < parameter;
                                          });
  if (found == parts_.end() || found->parameter != parameter) {
    return parts_.size();
  }
  return static_cast<size_t>(found - parts_.begin());
}

absl::StatusOr<std::vector<Share>> MakeShares(const Layout& layout,
                                              PartitionMode mode,
                                              uint32_t ranks) {
  std::vector<Share> shares;
  shares.reserve(ranks);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    OPTSTATE_ASSIGN_OR_RETURN(const RankPartition partition,
                              MakeRankPartition(layout, mode, ranks, rank));
    std::vector<OwnedPart> parts;
    for (const Piece& piece : partition.pieces) {
      if (piece.numel == 0) continue;
      parts.push_back({.parameter = piece.parameter,
                       .begin = piece.begin,
                       .count = piece.numel,
                       .place = 0});
    }
    shares.emplace_back(std::move(parts));
  }
  return shares;
}

Share InBytes(const Share& share, const LayoutSpec& layout) {
  std::vector<OwnedPart> parts = share.parts();
  for (OwnedPart& each : parts) {
    const uint64_t bytes = SizeInBytes(layout.parameters[each.parameter].dtype);
    each.begin *= bytes;
    each.count *= bytes;
  }
  return Share(std::move(parts));
}

LayoutSpec MakeNodeLayout(const LayoutSpec& layout,
                          absl::Span<const Share* const> shares) {
  LayoutSpec node = layout;
  node.parameters.clear();
  for (uint32_t p = 0; p < layout.parameters.size(); ++p) {
    const ParameterSpec& whole = layout.parameters[p];
    bool is_here = false;
    for (uint32_t local = 0; local < shares.size(); ++local) {
      const size_t index = shares[local]->IndexOf(p);
      if (index == shares[local]->parts().size()) continue;
      node.parameters.push_back(
          ShardOf(whole, shares[local]->parts()[index], local));
      is_here = true;
    }
    if (!is_here) node.parameters.push_back(Elsewhere(whole));
  }
  return node;
}

}  // namespace optstate::client
