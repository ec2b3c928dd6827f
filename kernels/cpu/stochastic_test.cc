// Tests every target against random_bits.h, bit by bit.

#include "kernels/cpu/stochastic.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/guarded_array.h"
#include "kernels/cpu/targets.h"
#include "kernels/random_bits.h"
#include "kernels/test_seed.h"

namespace optstate::kernels::cpu {
namespace {

// Computes the definition: arrays 0 and 1 have a half each of stream 0, array 2
// has the upper one of stream 1.
std::vector<uint16_t> Expected(uint32_t seed, uint32_t array, uint64_t flat,
                               const std::vector<float>& values) {
  std::vector<uint16_t> rounded;
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = RandomBits(seed, array / 2, flat + i);
    const uint32_t random = array % 2 == 0 ? bits >> 16 : bits & 0xFFFF;
    rounded.push_back(static_cast<uint16_t>(
        (std::bit_cast<uint32_t>(values[i]) + random) >> 16));
  }
  return rounded;
}

TEST(StochasticTest, EveryTargetRoundsByTheElementsOwnBits) {
  std::mt19937 random(TestSeed());
  std::normal_distribution<float> normal;
  for (const size_t numel : {0, 1, 3, 15, 16, 17, 64, 601}) {
    std::vector<float> values(numel);
    for (float& value : values) value = normal(random);
    for (const uint64_t flat : {uint64_t{0}, uint64_t{48},
                                // The range crosses 2^32, within a vector.
                                (uint64_t{5} << 32) - 7}) {
      for (const int array : {0, 1, 2}) {
        const auto seed = static_cast<uint32_t>(random());
        const std::vector<uint16_t> expected =
            Expected(seed, static_cast<uint32_t>(array), flat, values);
        for (const Target target : SupportedTargets()) {
          GuardedArray<uint16_t> rounded(std::vector<uint16_t>(numel), 3);
          RoundStochasticallyOn(target, seed, array, flat, values.data(),
                                rounded.data(), numel);
          EXPECT_EQ(rounded.elements(), expected)
              << TargetName(target) << " " << numel << " from " << flat
              << ", array " << array;
          EXPECT_TRUE(rounded.GuardsAreIntact());
        }
      }
    }
  }
}

TEST(StochasticTest, WhatNeedsNoRoundingStays) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {0.0f,      -0.0f,      1.5f, -0.375f,
                                     kInfinity, -kInfinity, kNan};
  std::vector<uint16_t> rounded(values.size());
  for (uint32_t seed = 0; seed < 100; ++seed) {
    RoundStochasticallyOn(BestTarget(), seed, /*array=*/1, /*flat=*/seed,
                          values.data(), rounded.data(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(uint32_t{rounded[i]} << 16, std::bit_cast<uint32_t>(values[i]));
    }
  }
}

}  // namespace
}  // namespace optstate::kernels::cpu
