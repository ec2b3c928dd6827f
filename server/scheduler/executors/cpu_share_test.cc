#include "server/scheduler/executors/cpu_share.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/layout.h"

namespace optstate::scheduler {
namespace {

// Returns which tiles of a layout with so many elements are the CPU's.
std::vector<bool> TilesOf(double fraction, uint64_t flat_elements) {
  CpuShare share(fraction, flat_elements);
  std::vector<bool> tiles;
  for (uint64_t begin = 0; begin < flat_elements; begin += kTileElements) {
    UpdateTask task;
    task.view.flat_begin = begin;
    task.view.numel = std::min(uint64_t{kTileElements}, flat_elements - begin);
    tiles.push_back(share.Has(task));
  }
  return tiles;
}

TEST(CpuShareTest, TheCpuHasItsFractionOfTheTiles) {
  for (const uint64_t tiles : {1, 3, 100, 256, 300, 1000, 2560}) {
    for (const double fraction : {0.0, 0.01, 0.3, 0.5, 0.75, 1.0}) {
      const std::vector<bool> cpu = TilesOf(fraction, tiles * kTileElements);
      const auto count =
          static_cast<double>(std::count(cpu.begin(), cpu.end(), true));
      const double expected = fraction * static_cast<double>(tiles);
      // Each block is as near as half a tile.
      const uint64_t blocks = tiles / 256 + 1;
      EXPECT_NEAR(count, expected, 0.5 * static_cast<double>(blocks))
          << tiles << " tiles, fraction " << fraction;
      if (fraction == 0 || fraction == 1) {
        EXPECT_EQ(count, expected);
      }
    }
  }
}

TEST(CpuShareTest, TilesOfOneSideLieTogether) {
  const std::vector<bool> cpu = TilesOf(0.5, 10 * CpuShare::kBlockElements);
  size_t changes = 0;
  for (size_t i = 1; i < cpu.size(); ++i) {
    if (cpu[i] != cpu[i - 1]) ++changes;
  }
  EXPECT_EQ(changes, 19u);
}

// An answer depends on the place alone, not on what was asked before.
TEST(CpuShareTest, ATileIsOnOneSideInEveryPass) {
  constexpr uint64_t kElements = 3 * CpuShare::kBlockElements / 2;
  const std::vector<bool> cpu = TilesOf(0.3, kElements);
  CpuShare share(0.3, kElements);
  for (int pass = 0; pass < 3; ++pass) {
    for (size_t i = pass; i < cpu.size(); i += 1 + pass) {
      UpdateTask task;
      task.view.flat_begin = i * kTileElements;
      task.view.numel = kTileElements;
      EXPECT_EQ(share.Has(task), cpu[i]) << "tile " << i;
    }
  }
}

class NoRecord final : public WholeRecord {
 public:
  WholeParameter Describe(uint32_t /*parameter*/) const override { return {}; }
  void Gather(uint32_t /*parameter*/,
              const WholeArrays& /*to*/) const override {}
  void WriteBack(uint32_t /*parameter*/, const WholeArrays& /*from*/) override {
  }
  void Update(uint32_t /*parameter*/) override {}
};

TEST(CpuShareTest, WholeParametersAreCounted) {
  NoRecord record;
  CpuShare share(0.5, 1 << 20);
  double cpu = 0, all = 0;
  for (const uint64_t numel : {300000, 70000, 1, 70000, 90000, 60000, 3}) {
    UpdateTask task;
    task.whole = &record;
    task.view.numel = numel;
    all += static_cast<double>(numel);
    if (share.Has(task)) cpu += static_cast<double>(numel);
  }
  EXPECT_NEAR(cpu, all / 2, 60000);

  CpuShare charged(0.5, 1 << 20);
  charged.Charge(1000);
  UpdateTask task;
  task.whole = &record;
  task.view.numel = 900;
  EXPECT_FALSE(charged.Has(task));
}

}  // namespace
}  // namespace optstate::scheduler
