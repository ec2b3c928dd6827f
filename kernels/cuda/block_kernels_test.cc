// Tests the work of CUDA's blocks of threads, done by loops, against Highway's
// kernels on every target, bit by bit. No GPU is needed.

#include "kernels/cuda/block_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/rule_calls.h"
#include "kernels/cpu/targets.h"
#include "kernels/cuda/serial_block.h"
#include "kernels/cuda/serial_launch.h"
#include "kernels/cuda/test_tiles.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/reduction.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {
namespace {

using Order = SerialBlock::Order;

// Updates a view as tiles of `kTileElements`, in one launch.
template <Order kOrder, size_t kTileElements>
bool ApplyTiles(const UpdateKernelKey& key, const UpdateFactors& factors,
                const TileView& view) {
  const std::vector<TileTask> tasks =
      TilesOf(key, factors, view, kTileElements);
  const UpdateFactors all[] = {{}, factors};
  return UpdateSerially(kOrder, key.optimizer, key.options, tasks, all);
}

// Does the same with arrays that are aligned as a device's are, whose whole
// vectors are loaded at once.
template <Order kOrder, size_t kTileElements>
bool ApplyVectors(const UpdateKernelKey& key, const UpdateFactors& factors,
                  const TileView& view) {
  return UpdateCopies<AlignedMemory>(
      key, view, [&](const TileView& moved, Copies<AlignedMemory>*) {
        return ApplyTiles<kOrder, kTileElements>(key, factors, moved);
      });
}

constexpr uint64_t kFlatBegin = (uint64_t{1} << 32) - 700;

class BlockUpdateTest : public testing::TestWithParam<UpdateKernelKey> {};

TEST_P(BlockUpdateTest, IsWhatEveryTargetDoes) {
  const UpdateKernelKey& key = GetParam();
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = cpu::FirstFactors(key);
  for (size_t numel : {0, 1, 255, 256, 257, 1000, 3000}) {
    const auto elements = cpu::RandomElements(numel, &random);
    const auto apply = [&](auto* function) {
      return cpu::Apply({.target = cpu::PlainTarget(),
                         .flat_begin = kFlatBegin,
                         .apply = function},
                        key, factors, elements);
    };
    const cpu::Result one_tile = apply(&ApplyTiles<Order::kUp, 4096>);
    EXPECT_EQ(apply(&ApplyTiles<Order::kDown, 4096>), one_tile);
    EXPECT_EQ(apply(&ApplyTiles<Order::kUp, 512>), one_tile);
    EXPECT_EQ(apply(&ApplyVectors<Order::kUp, 4096>), one_tile);
    EXPECT_EQ(apply(&ApplyVectors<Order::kDown, 512>), one_tile);
    for (cpu::Target target : cpu::SupportedTargets()) {
      ASSERT_EQ(cpu::Apply({.target = target, .flat_begin = kFlatBegin}, key,
                           factors, elements),
                one_tile)
          << cpu::TargetName(target) << " x " << numel;
    }
  }
}

// Within one vector the flat position passes a multiple of 2^32, from where on
// random bits have another key.
TEST_P(BlockUpdateTest, LanesOfAVectorHaveTheirOwnKeys) {
  const UpdateKernelKey& key = GetParam();
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = cpu::FirstFactors(key);
  constexpr uint64_t kBegin = kFlatBegin - 1;
  static_assert(kBegin % scalar::kVectorElements != 0);
  const auto elements = cpu::RandomElements(1000, &random);
  EXPECT_EQ(cpu::Apply({.target = cpu::PlainTarget(),
                        .flat_begin = kBegin,
                        .apply = &ApplyVectors<Order::kUp, 4096>},
                       key, factors, elements),
            cpu::Apply({.target = cpu::PlainTarget(), .flat_begin = kBegin},
                       key, factors, elements));
}

INSTANTIATE_TEST_SUITE_P(Keys, BlockUpdateTest,
                         testing::ValuesIn(cpu::AllKeys()),
                         [](const auto& key) {
                           return cpu::NameOfKey(key.param);
                         });

uint64_t Bits(double value) { return std::bit_cast<uint64_t>(value); }

// Returns one sum of squares for each parameter, of tiles of 512.
std::vector<double> SumsOfSquares(absl::Span<const ReduceTask> tasks,
                                  absl::Span<const ParameterTasks> parameters,
                                  Order order, bool* found_inf) {
  const auto count = static_cast<uint32_t>(tasks.size());
  std::vector<double> results(count);
  uint32_t found = 0;
  for (uint32_t first = 0; first < count; first += kBlockArrays) {
    ReduceShared shared;
    ReduceArrays<Reduction::kSumOfSquares>(SerialBlock(order), tasks.data(),
                                           first, count, results.data(), &found,
                                           &shared);
  }
  *found_inf = found != 0;
  std::vector<double> sums(parameters.size());
  for (size_t k = 0; k < parameters.size(); ++k) {
    AddTiles(parameters[k], results.data(), &sums[k]);
  }
  return sums;
}

TEST(BlockReduceTest, SumsTilesInOrderAsEveryTargetDoes) {
  constexpr size_t kTile = 512;
  std::mt19937 random(TestSeed());
  const size_t numels[] = {1, 40 * kTile + 17, kTile, 3 * kTile - 1};
  for (float special :
       {0.0f, 1e-42f, 3e38f, std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<std::vector<float>> gradients;
    for (size_t numel : numels) {
      gradients.emplace_back();
      for (size_t i = 0; i < numel; ++i) {
        gradients.back().push_back(cpu::RandomNormal(&random));
      }
    }
    gradients[1][1000] = special;
    // Each parameter has its gradient twice.
    std::vector<const void*> pointers;
    for (const auto& gradient : gradients) {
      pointers.insert(pointers.end(), {gradient.data(), gradient.data()});
    }
    std::vector<ReduceTask> tasks;
    std::vector<ParameterTasks> parameters;
    for (size_t p = 0; p < gradients.size(); ++p) {
      const auto begin = static_cast<uint32_t>(tasks.size());
      for (size_t i = 0; i < gradients[p].size(); i += kTile) {
        tasks.push_back({{&pointers[2 * p], 2, DType::kFloat32, i},
                         std::min(kTile, gradients[p].size() - i)});
      }
      parameters.push_back({begin, static_cast<uint32_t>(tasks.size())});
    }
    bool found_inf = false;
    const auto sums = SumsOfSquares(tasks, parameters, Order::kUp, &found_inf);
    EXPECT_EQ(found_inf, !std::isfinite(2 * special));
    bool found_again = false;
    const auto again =
        SumsOfSquares(tasks, parameters, Order::kDown, &found_again);
    EXPECT_EQ(found_again, found_inf);
    for (cpu::Target target : cpu::SupportedTargets()) {
      for (size_t p = 0; p < gradients.size(); ++p) {
        double expected = 0;
        for (size_t i = 0; i < gradients[p].size(); i += kTile) {
          const void* const both[] = {gradients[p].data() + i,
                                      gradients[p].data() + i};
          expected +=
              cpu::ReduceOn(target, Reduction::kSumOfSquares, DType::kFloat32,
                            both, std::min(kTile, gradients[p].size() - i));
        }
        EXPECT_EQ(Bits(sums[p]), Bits(expected)) << cpu::TargetName(target);
        EXPECT_EQ(Bits(again[p]), Bits(expected)) << cpu::TargetName(target);
      }
    }
  }
}

}  // namespace
}  // namespace optstate::kernels::cuda
