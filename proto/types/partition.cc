#include "proto/types/partition.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

uint64_t NumelOf(const Layout& layout, uint32_t parameter) {
  return static_cast<uint64_t>(layout.parameters()[parameter].numel);
}

// Returns parameters in the order in which greedy assigns them.
std::vector<uint32_t> GreedyOrder(const Layout& layout) {
  const auto parameters = layout.parameters();
  std::vector<uint32_t> order(parameters.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [parameters](uint32_t a, uint32_t b) {
                     if (parameters[a].group != parameters[b].group) {
                       return parameters[a].group < parameters[b].group;
                     }
                     return parameters[a].numel > parameters[b].numel;
                   });
  return order;
}

std::vector<Piece> GreedyPieces(const Layout& layout, uint32_t world_size,
                                uint32_t rank) {
  // (elements so far, rank): the top is the least loaded, lower rank first.
  using Load = std::pair<uint64_t, uint32_t>;
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (uint32_t r = 0; r < world_size; ++r) loads.push({0, r});

  std::vector<Piece> pieces;
  for (uint32_t parameter : GreedyOrder(layout)) {
    const uint64_t numel = NumelOf(layout, parameter);
    const auto [load, owner] = loads.top();
    loads.pop();
    loads.push({load + numel, owner});
    if (owner == rank) {
      pieces.push_back({.parameter = parameter, .begin = 0, .numel = numel});
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.parameter < b.parameter;
  });
  return pieces;
}

std::vector<Piece> ContiguousPieces(const Layout& layout, uint32_t world_size,
                                    uint32_t rank) {
  // There are fewer than 2^36 tiles and 2^10 ranks: the products fit.
  const uint64_t tiles = layout.flat_elements() / kTileElements;
  const uint64_t begin = tiles * rank / world_size * kTileElements;
  const uint64_t end = tiles * (rank + 1) / world_size * kTileElements;
  const bool last_rank = rank + 1 == world_size;

  std::vector<Piece> pieces;
  for (uint32_t i = 0; i < layout.parameters().size(); ++i) {
    const uint64_t first = layout.flat_offset(i);
    const uint64_t numel = NumelOf(layout, i);
    if (numel == 0) {
      // The rank in whose slice it would start owns it; at the very end the
      // last rank does.
      const bool mine = (begin <= first && first < end) ||
                        (last_rank && first == layout.flat_elements());
      if (mine) pieces.push_back({.parameter = i, .begin = 0, .numel = 0});
      continue;
    }
    const uint64_t low = std::max(first, begin);
    const uint64_t high = std::min(first + numel, end);
    if (low < high) {
      pieces.push_back(
          {.parameter = i, .begin = low - first, .numel = high - low});
    }
  }
  return pieces;
}

std::vector<Piece> ReplicatedPieces(const Layout& layout) {
  std::vector<Piece> pieces(layout.parameters().size());
  for (uint32_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {.parameter = i, .begin = 0, .numel = NumelOf(layout, i)};
  }
  return pieces;
}

absl::StatusOr<std::vector<Piece>> LocalPieces(const Layout& layout,
                                               uint32_t world_size,
                                               uint32_t rank) {
  std::vector<Piece> pieces;
  for (uint32_t i = 0; i < layout.parameters().size(); ++i) {
    const ParameterSpec& parameter = layout.parameters()[i];
    if (parameter.shard->owner >= world_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a shard of parameter \"", absl::CEscape(GlobalName(parameter.name)),
          "\" is owned by rank ", parameter.shard->owner,
          ", which is not below the world size ", world_size));
    }
    if (parameter.shard->owner == rank) {
      pieces.push_back(
          {.parameter = i, .begin = 0, .numel = NumelOf(layout, i)});
    }
  }
  return pieces;
}

// Places the pieces' gradients one after another.
RankPartition PlaceGradients(const Layout& layout, std::vector<Piece> pieces) {
  uint64_t offset_bytes = 0;
  for (Piece& piece : pieces) {
    piece.gradient_offset_bytes = offset_bytes;
    const DType dtype = layout.parameters()[piece.parameter].gradient_dtype;
    const uint64_t bytes = piece.numel * SizeInBytes(dtype);
    offset_bytes += (bytes + kSegmentAlignBytes - 1) / kSegmentAlignBytes *
                    kSegmentAlignBytes;
  }
  return {.pieces = std::move(pieces), .gradient_area_bytes = offset_bytes};
}

}  // namespace

size_t RankPartition::LowerBound(uint32_t parameter) const {
  const auto it = std::lower_bound(
      pieces.begin(), pieces.end(), parameter,
      [](const Piece& piece, uint32_t p) { return piece.parameter < p; });
  return static_cast<size_t>(it - pieces.begin());
}

absl::StatusOr<RankPartition> MakeRankPartition(const Layout& layout,
                                                PartitionMode mode,
                                                uint32_t world_size,
                                                uint32_t rank) {
  if (world_size < 1 || world_size > kWorldSizeMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "world size ", world_size, " is not in [1, ", kWorldSizeMax, "]"));
  }
  if (rank >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rank, " is not below the world size ", world_size));
  }
  if (layout.has_shards() != (mode == PartitionMode::kLocal)) {
    return absl::InvalidArgumentError(
        layout.has_shards()
            ? "the parameters are shards, which only partition local takes"
            : "partition local is for parameters that are shards, and these "
              "are not");
  }
  switch (mode) {
    case PartitionMode::kGreedy:
      return PlaceGradients(layout, GreedyPieces(layout, world_size, rank));
    case PartitionMode::kContiguous:
      return PlaceGradients(layout, ContiguousPieces(layout, world_size, rank));
    case PartitionMode::kReplicated:
      return PlaceGradients(layout, ReplicatedPieces(layout));
    case PartitionMode::kLocal: {
      OPTSTATE_ASSIGN_OR_RETURN(std::vector<Piece> pieces,
                                LocalPieces(layout, world_size, rank));
      return PlaceGradients(layout, std::move(pieces));
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "partition mode ", static_cast<uint32_t>(mode), " is not a known one"));
}

}  // namespace optstate
