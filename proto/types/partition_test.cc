#include "proto/types/partition.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate {
namespace {

Layout MakeLayout(LayoutSpec spec) {
  absl::StatusOr<Layout> layout = Layout::Make(std::move(spec));
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

// Makes a layout with one parameter per (numel, group).
Layout LayoutOf(const std::vector<std::pair<int64_t, uint32_t>>& sizes) {
  LayoutSpec spec;
  for (const auto& [numel, group] : sizes) {
    while (spec.groups.size() <= group) spec.groups.push_back({});
    spec.parameters.push_back(
        {.name = absl::StrCat("p", spec.parameters.size()),
         .shape = {numel},
         .numel = numel,
         .group = group});
  }
  return MakeLayout(std::move(spec));
}

std::vector<RankPartition> AllRanks(const Layout& layout, PartitionMode mode,
                                    uint32_t world_size) {
  std::vector<RankPartition> ranks;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    auto partition = MakeRankPartition(layout, mode, world_size, rank);
    EXPECT_TRUE(partition.ok()) << partition.status();
    ranks.push_back(*std::move(partition));
  }
  return ranks;
}

// Checks that every element of every parameter belongs to exactly one piece,
// and every parameter without elements to exactly one rank.
void ExpectTiles(const Layout& layout,
                 const std::vector<RankPartition>& ranks) {
  std::vector<std::vector<int>> owners;
  std::vector<int> piece_count(layout.parameters().size());
  for (const ParameterSpec& p : layout.parameters())
    owners.emplace_back(p.numel);
  for (const RankPartition& rank : ranks) {
    for (const Piece& piece : rank.pieces) {
      ASSERT_LT(piece.parameter, owners.size());
      std::vector<int>& elements = owners[piece.parameter];
      ASSERT_LE(piece.begin + piece.numel, elements.size());
      EXPECT_EQ(piece.numel == 0, elements.empty());
      ++piece_count[piece.parameter];
      for (uint64_t i = 0; i < piece.numel; ++i) ++elements[piece.begin + i];
    }
  }
  for (size_t p = 0; p < owners.size(); ++p) {
    EXPECT_EQ(owners[p], std::vector<int>(owners[p].size(), 1)) << p;
    if (owners[p].empty()) {
      EXPECT_EQ(piece_count[p], 1) << p;
    }
  }
}

void ExpectGradientsApart(const Layout& layout, const RankPartition& rank) {
  uint64_t end_bytes = 0;
  for (size_t i = 0; i < rank.pieces.size(); ++i) {
    const Piece& piece = rank.pieces[i];
    if (i > 0) {
      EXPECT_LT(rank.pieces[i - 1].parameter, piece.parameter);
    }
    EXPECT_EQ(piece.gradient_offset_bytes % kSegmentAlignBytes, 0u);
    EXPECT_GE(piece.gradient_offset_bytes, end_bytes);
    const DType dtype = layout.parameters()[piece.parameter].gradient_dtype;
    end_bytes = piece.gradient_offset_bytes + piece.numel * SizeInBytes(dtype);
  }
  EXPECT_LE(end_bytes, rank.gradient_area_bytes);
  EXPECT_LT(rank.gradient_area_bytes, end_bytes + kSegmentAlignBytes);
}

// Follows torch's ZeroRedundancyOptimizer._partition_parameters, line by line.
std::vector<uint32_t> TorchOwners(const Layout& layout, uint32_t world_size) {
  std::vector<uint32_t> owner(layout.parameters().size());
  std::vector<uint64_t> sizes(world_size);
  for (uint32_t group = 0; group < layout.groups().size(); ++group) {
    std::vector<bool> taken(owner.size());
    while (true) {
      int64_t largest = -1;
      uint32_t next = 0;
      for (uint32_t i = 0; i < owner.size(); ++i) {
        const ParameterSpec& p = layout.parameters()[i];
        if (p.group == group && !taken[i] && p.numel > largest) {
          largest = p.numel;
          next = i;
        }
      }
      if (largest < 0) break;
      uint32_t least = 0;
      for (uint32_t r = 1; r < world_size; ++r) {
        if (sizes[r] < sizes[least]) least = r;
      }
      taken[next] = true;
      owner[next] = least;
      sizes[least] += static_cast<uint64_t>(largest);
    }
  }
  return owner;
}

class PartitionTest : public testing::TestWithParam<PartitionMode> {};

INSTANTIATE_TEST_SUITE_P(Modes, PartitionTest,
                         testing::Values(PartitionMode::kGreedy,
                                         PartitionMode::kContiguous),
                         [](const auto& param_info) -> std::string {
                           return param_info.param == PartitionMode::kGreedy
                                      ? "Greedy"
                                      : "Contiguous";
                         });

TEST_P(PartitionTest, RanksTileEveryParameterOnce) {
  RandomLayouts random;
  for (int round = 0; round < 60; ++round) {
    const Layout layout = MakeLayout(random.Next(40));
    const uint32_t world_size = random.Uniform(1, 17);
    const auto ranks = AllRanks(layout, GetParam(), world_size);
    ExpectTiles(layout, ranks);
    for (const RankPartition& rank : ranks) ExpectGradientsApart(layout, rank);
  }
}

TEST_P(PartitionTest, MoreRanksThanElements) {
  const Layout layout = LayoutOf({{0, 0}, {1, 0}, {0, 0}, {1, 1}, {0, 2}});
  ExpectTiles(layout, AllRanks(layout, GetParam(), kWorldSizeMax));
}

TEST_P(PartitionTest, NothingButParametersWithoutElements) {
  const Layout layout = LayoutOf({{0, 0}, {0, 0}, {0, 1}});
  ExpectTiles(layout, AllRanks(layout, GetParam(), 4));
}

TEST_P(PartitionTest, AHundredThousandParameters) {
  std::vector<std::pair<int64_t, uint32_t>> sizes;
  for (int i = 0; i < 100000; ++i) sizes.push_back({i % 97, i / 30000});
  const Layout layout = LayoutOf(sizes);
  ExpectTiles(layout, AllRanks(layout, GetParam(), 8));
}

TEST_P(PartitionTest, RefusesBadRanks) {
  const Layout layout = LayoutOf({{1, 0}});
  const auto code = [&](uint32_t world_size, uint32_t rank) {
    return MakeRankPartition(layout, GetParam(), world_size, rank)
        .status()
        .code();
  };
  EXPECT_EQ(code(0, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(2, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kWorldSizeMax + 1, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kWorldSizeMax, kWorldSizeMax - 1), absl::StatusCode::kOk);
}

TEST_P(PartitionTest, LowerBoundFindsTheFirstPieceFromAParameterOn) {
  RandomLayouts random;
  for (int round = 0; round < 20; ++round) {
    const Layout layout = MakeLayout(random.Next(40));
    for (const RankPartition& rank : AllRanks(layout, GetParam(), 3)) {
      for (uint32_t p = 0; p <= layout.parameters().size(); ++p) {
        size_t expected = 0;
        while (expected < rank.pieces.size() &&
               rank.pieces[expected].parameter < p) {
          ++expected;
        }
        EXPECT_EQ(rank.LowerBound(p), expected);
      }
    }
  }
}

TEST(GreedyPartitionTest, OwnersAreTorchs) {
  RandomLayouts random;
  for (int round = 0; round < 60; ++round) {
    const Layout layout = MakeLayout(random.Next(40));
    const uint32_t world_size = random.Uniform(1, 9);
    const auto ranks = AllRanks(layout, PartitionMode::kGreedy, world_size);
    const std::vector<uint32_t> owner = TorchOwners(layout, world_size);
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      for (const Piece& piece : ranks[rank].pieces) {
        EXPECT_EQ(owner[piece.parameter], rank) << piece.parameter;
      }
    }
  }
}

TEST(GreedyPartitionTest, TiesGoToTheLowerIndexAndRank) {
  const Layout layout = LayoutOf({{5, 0}, {9, 0}, {5, 0}, {5, 0}});
  const auto ranks = AllRanks(layout, PartitionMode::kGreedy, 2);
  ASSERT_EQ(ranks[0].pieces.size(), 2u);  // 9, then the last 5
  EXPECT_EQ(ranks[0].pieces[0].parameter, 1u);
  EXPECT_EQ(ranks[0].pieces[1].parameter, 3u);
  ASSERT_EQ(ranks[1].pieces.size(), 2u);
  EXPECT_EQ(ranks[1].pieces[0].parameter, 0u);
  EXPECT_EQ(ranks[1].pieces[1].parameter, 2u);
}

TEST(GreedyPartitionTest, AnExtensionMovesNothing) {
  RandomLayouts random;
  for (int round = 0; round < 20; ++round) {
    LayoutSpec spec = random.Next(30);
    const Layout before = MakeLayout(spec);
    spec.groups.push_back({});
    spec.parameters.push_back(
        {.name = "more",
         .shape = {100000},
         .numel = 100000,
         .group = static_cast<uint32_t>(spec.groups.size() - 1)});
    const Layout after = MakeLayout(std::move(spec));
    const auto old_ranks = AllRanks(before, PartitionMode::kGreedy, 3);
    const auto new_ranks = AllRanks(after, PartitionMode::kGreedy, 3);
    for (size_t rank = 0; rank < old_ranks.size(); ++rank) {
      for (size_t i = 0; i < old_ranks[rank].pieces.size(); ++i) {
        const Piece& was = old_ranks[rank].pieces[i];
        const Piece& is = new_ranks[rank].pieces[i];
        EXPECT_EQ(was.parameter, is.parameter);
        EXPECT_EQ(was.gradient_offset_bytes, is.gradient_offset_bytes);
      }
    }
  }
}

TEST(ContiguousPartitionTest, CutsOnlyAtTiles) {
  RandomLayouts random;
  for (int round = 0; round < 60; ++round) {
    const Layout layout = MakeLayout(random.Next(40));
    const uint32_t world_size = random.Uniform(1, 9);
    const uint64_t tiles = layout.flat_elements() / kTileElements;
    const auto ranks = AllRanks(layout, PartitionMode::kContiguous, world_size);
    for (uint64_t rank = 0; rank < world_size; ++rank) {
      for (const Piece& piece : ranks[rank].pieces) {
        if (piece.numel == 0) continue;
        const uint64_t numel = layout.parameters()[piece.parameter].numel;
        const uint64_t first =
            layout.flat_offset(piece.parameter) + piece.begin;
        const uint64_t end = first + piece.numel;
        if (piece.begin != 0) {
          EXPECT_EQ(first % kTileElements, 0u);
        }
        if (piece.begin + piece.numel != numel) {
          EXPECT_EQ(end % kTileElements, 0u);
        }
        EXPECT_GE(first / kTileElements, tiles * rank / world_size);
        EXPECT_LE((end - 1) / kTileElements + 1,
                  tiles * (rank + 1) / world_size);
      }
    }
  }
}

// Makes a layout of tensors of 10 elements, each cut into one shard for each of
// these (owner, elements).
Layout LayoutOfShards(
    const std::vector<std::vector<std::pair<uint32_t, int64_t>>>& tensors) {
  LayoutSpec spec;
  spec.groups.push_back({});
  for (size_t i = 0; i < tensors.size(); ++i) {
    int64_t begin = 0;
    for (const auto& [owner, numel] : tensors[i]) {
      spec.parameters.push_back(
          {.name = ShardName(absl::StrCat("p", i), owner),
           .shape = {numel},
           .numel = numel,
           .shard =
               Shard{.owner = owner, .global_shape = {10}, .offset = {begin}}});
      begin += numel;
    }
  }
  return MakeLayout(std::move(spec));
}

TEST(LocalPartitionTest, ARankHasTheShardsThatItOwns) {
  const Layout layout =
      LayoutOfShards({{{0, 5}, {1, 5}}, {{1, 10}, {2, 0}}, {{0, 4}, {2, 6}}});
  const auto ranks = AllRanks(layout, PartitionMode::kLocal, 4);
  ExpectTiles(layout, ranks);
  for (const RankPartition& rank : ranks) ExpectGradientsApart(layout, rank);
  const auto parameters_of = [&ranks](uint32_t rank) {
    std::vector<uint32_t> found;
    for (const Piece& piece : ranks[rank].pieces) {
      found.push_back(piece.parameter);
    }
    return found;
  };
  EXPECT_EQ(parameters_of(0), (std::vector<uint32_t>{0, 4}));
  EXPECT_EQ(parameters_of(1), (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(parameters_of(2), (std::vector<uint32_t>{3, 5}));
  EXPECT_TRUE(ranks[3].pieces.empty());
}

TEST(LocalPartitionTest, OwnersAreRanks) {
  const absl::Status status =
      MakeRankPartition(LayoutOfShards({{{0, 5}, {3, 5}}}),
                        PartitionMode::kLocal, 3, 0)
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "a shard of parameter \"p0\" is owned by rank 3, which is not "
            "below the world size 3");
}

TEST(LocalPartitionTest, IsForShardsAndShardsAreForIt) {
  const auto code_of = [](const Layout& layout, PartitionMode mode) {
    return MakeRankPartition(layout, mode, 2, 0).status().code();
  };
  const Layout shards = LayoutOfShards({{{0, 5}, {1, 5}}});
  const Layout whole = LayoutOf({{10, 0}});
  EXPECT_EQ(code_of(whole, PartitionMode::kLocal),
            absl::StatusCode::kInvalidArgument);
  for (const PartitionMode mode :
       {PartitionMode::kGreedy, PartitionMode::kContiguous,
        PartitionMode::kReplicated}) {
    EXPECT_EQ(code_of(whole, mode), absl::StatusCode::kOk);
    EXPECT_EQ(code_of(shards, mode), absl::StatusCode::kInvalidArgument);
  }
}

TEST(ContiguousPartitionTest, OneLargeParameterIsSharedEvenly) {
  const Layout layout = LayoutOf({{8 * 4096 + 1, 0}});
  const auto ranks = AllRanks(layout, PartitionMode::kContiguous, 3);
  ASSERT_EQ(ranks[2].pieces.size(), 1u);
  EXPECT_EQ(ranks[0].pieces[0].numel, 3u * 4096);
  EXPECT_EQ(ranks[1].pieces[0].numel, 3u * 4096);
  EXPECT_EQ(ranks[2].pieces[0].begin, 6u * 4096);
  EXPECT_EQ(ranks[2].pieces[0].numel, 2u * 4096 + 1);
}

}  // namespace
}  // namespace optstate
