#include "client/collective/sharded/ownership.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

TEST(Ownership, EveryElementHasOneOwner) {
  const auto layout = Layout::Make(MixedLayout());
  ASSERT_TRUE(layout.ok()) << layout.status();
  for (const PartitionMode mode :
       {PartitionMode::kGreedy, PartitionMode::kContiguous}) {
    for (uint32_t ranks = 1; ranks <= 9; ++ranks) {
      const auto shares = MakeShares(*layout, mode, ranks);
      ASSERT_TRUE(shares.ok()) << shares.status();
      ASSERT_EQ(shares->size(), ranks);
      std::vector<std::vector<int>> owners;
      for (const ParameterSpec& each : layout->parameters()) {
        owners.emplace_back(static_cast<size_t>(each.numel), 0);
      }
      for (const Share& share : *shares) {
        uint64_t next = 0;
        for (size_t i = 0; i < share.parts().size(); ++i) {
          const OwnedPart& part = share.parts()[i];
          EXPECT_EQ(share.IndexOf(part.parameter), i);
          EXPECT_EQ(part.place, next);
          next += part.count;
          for (uint64_t k = 0; k < part.count; ++k) {
            ++owners[part.parameter][part.begin + k];
          }
        }
        EXPECT_EQ(share.size(), next);
        EXPECT_EQ(share.IndexOf(3), share.parts().size()) << "it is empty";
      }
      for (const std::vector<int>& each : owners) {
        EXPECT_EQ(each, std::vector<int>(each.size(), 1));
      }
    }
  }
}

// The ranges of several visits are those of one, cut.
TEST(Ownership, VisitsCoverEachUnitOnce) {
  const Share share({{.parameter = 0, .begin = 10, .count = 5, .place = 0},
                     {.parameter = 2, .begin = 0, .count = 1, .place = 0},
                     {.parameter = 7, .begin = 3, .count = 8, .place = 0}});
  ASSERT_EQ(share.size(), 14u);
  for (uint64_t step = 1; step <= 15; ++step) {
    std::vector<int> seen(14, 0);
    for (uint64_t begin = 0; begin < 20; begin += step) {
      share.Visit(
          begin, begin + step,
          [&](size_t index, uint64_t at, uint64_t count, uint64_t offset) {
            const OwnedPart& part = share.parts()[index];
            EXPECT_EQ(part.place + (at - part.begin), begin + offset);
            EXPECT_LE(offset + count, step);
            EXPECT_GE(count, 1u);
            for (uint64_t i = 0; i < count; ++i) ++seen[begin + offset + i];
          });
    }
    EXPECT_EQ(seen, std::vector<int>(14, 1)) << step;
  }
}

TEST(Ownership, BytesAreOfEachParametersDType) {
  const LayoutSpec spec = MixedLayout();
  const auto layout = Layout::Make(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  const auto shares = MakeShares(*layout, PartitionMode::kContiguous, 3);
  ASSERT_TRUE(shares.ok()) << shares.status();
  uint64_t all = 0;
  for (const Share& each : *shares) all += InBytes(each, spec).size();
  uint64_t expected = 0;
  for (const ParameterSpec& each : spec.parameters) {
    expected += static_cast<uint64_t>(each.numel) * SizeInBytes(each.dtype);
  }
  EXPECT_EQ(all, expected);
}

TEST(Ownership, NodesHaveLayoutsThatTheDaemonTakes) {
  const LayoutSpec spec = MixedLayout();
  const auto layout = Layout::Make(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  for (const PartitionMode mode :
       {PartitionMode::kGreedy, PartitionMode::kContiguous}) {
    const auto shares = MakeShares(*layout, mode, 9);
    ASSERT_TRUE(shares.ok()) << shares.status();
    uint64_t elements = 0;
    for (size_t node = 0; node < 3; ++node) {
      const std::vector<const Share*> local = {&(*shares)[3 * node],
                                               &(*shares)[3 * node + 1],
                                               &(*shares)[3 * node + 2]};
      const auto here = Layout::Make(MakeNodeLayout(spec, local));
      ASSERT_TRUE(here.ok()) << here.status();
      EXPECT_TRUE(here->has_shards());
      EXPECT_EQ(here->groups().size(), spec.groups.size());
      elements += here->element_count();
      for (uint32_t rank = 0; rank < 3; ++rank) {
        const auto partition =
            MakeRankPartition(*here, PartitionMode::kLocal, 3, rank);
        ASSERT_TRUE(partition.ok()) << partition.status();
        uint64_t owned = 0;
        for (const Piece& each : partition->pieces) owned += each.numel;
        EXPECT_EQ(owned, local[rank]->size());
      }
    }
    EXPECT_EQ(elements, layout->element_count());
  }
}

}  // namespace
}  // namespace optstate::client
