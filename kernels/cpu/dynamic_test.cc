#include "kernels/cpu/dynamic.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/guarded_array.h"
#include "kernels/cpu/targets.h"
#include "kernels/dynamic_map.h"
#include "kernels/test_seed.h"

namespace optstate::kernels::cpu {
namespace {

constexpr size_t kBlock = 256;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Computes bitsandbytes' create_dynamic_map(signed, 7, 8), sorted.
std::vector<double> DefinedMap(bool is_signed) {
  std::vector<double> map = {0, 1};
  for (int i = 0; i < 7; ++i) {
    const int items = is_signed ? 1 << i : 1 << (i + 1);
    for (int k = 0; k < items; ++k) {
      const double begin = 0.1 + 0.9 * k / items;
      const double end = 0.1 + 0.9 * (k + 1) / items;
      const double value = std::pow(10., i - 6) * (begin + end) / 2;
      map.push_back(value);
      if (is_signed) map.push_back(-value);
    }
  }
  std::sort(map.begin(), map.end());
  return map;
}

// Returns the value of every code, as bytes: 0 is 0.
std::vector<double> DefinedValues(bool is_signed) {
  const std::vector<double> map = DefinedMap(is_signed);
  std::vector<double> values;
  for (size_t code = 0; code < 256; ++code) {
    values.push_back(map[is_signed ? (127 + 256 - code) % 256 : code]);
  }
  return values;
}

std::vector<float> Decoded(Target target, bool is_signed,
                           const std::vector<uint8_t>& codes,
                           const std::vector<float>& scale) {
  std::vector<float> values(codes.size());
  DecodeOn(target, is_signed, codes.data(), scale.data(), values.data(),
           codes.size());
  return values;
}

struct Encoded {
  std::vector<uint8_t> codes;
  std::vector<uint32_t> scale_bits;
  std::vector<float> scale;

  bool operator==(const Encoded& other) const {
    return codes == other.codes && scale_bits == other.scale_bits;
  }
};

Encoded Encode(Target target, bool is_signed,
               const std::vector<float>& values) {
  Encoded encoded;
  encoded.codes.resize(values.size());
  encoded.scale.resize((values.size() + kBlock - 1) / kBlock);
  EncodeOn(target, is_signed, values.data(), encoded.codes.data(),
           encoded.scale.data(), values.size());
  for (float scale : encoded.scale) {
    encoded.scale_bits.push_back(std::bit_cast<uint32_t>(scale));
  }
  return encoded;
}

std::vector<uint8_t> AllCodes() {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
  return codes;
}

class DynamicTest : public testing::TestWithParam<Target> {};

TEST_P(DynamicTest, HasTheMapOfBitsandbytes) {
  for (bool is_signed : {false, true}) {
    ASSERT_EQ(DefinedMap(is_signed).size(), 256u);
    const std::vector<double> defined = DefinedValues(is_signed);
    const std::vector<float> values =
        Decoded(GetParam(), is_signed, AllCodes(), {1});
    const std::vector<float> plain =
        Decoded(SupportedTargets().back(), is_signed, AllCodes(), {1});
    EXPECT_EQ(values, plain);
    for (size_t code = 0; code < 256; ++code) {
      EXPECT_NEAR(values[code], defined[code], 2e-7 * std::abs(defined[code]))
          << code;
    }
    EXPECT_EQ(values[0], 0);
  }
}

TEST_P(DynamicTest, CodesComeBack) {
  for (bool is_signed : {false, true}) {
    for (float scale : {1.0f, 0.37f, 1e-30f, 3e-38f, 1e30f, 3e38f}) {
      const std::vector<float> values =
          Decoded(GetParam(), is_signed, AllCodes(), {scale});
      const Encoded encoded = Encode(GetParam(), is_signed, values);
      EXPECT_EQ(encoded.scale[0], scale);
      // Denormals have not the bits to tell the small values apart.
      if (scale < 1e-37f) continue;
      EXPECT_EQ(encoded.codes, AllCodes()) << scale;
    }
  }
}

TEST_P(DynamicTest, TakesTheNearestOfEveryValue) {
  std::mt19937 random(TestSeed());
  std::uniform_real_distribution<double> exponent(-18, 0);
  for (bool is_signed : {false, true}) {
    const std::vector<double> map = DefinedMap(is_signed);
    std::vector<double> middles;
    for (size_t k = 1; k < map.size(); ++k) {
      middles.push_back((map[k - 1] + map[k]) / 2);
    }
    for (int round = 0; round < 200; ++round) {
      const float scale = static_cast<float>(std::exp(exponent(random)));
      std::vector<float> values(kBlock);
      for (float& x : values) {
        double value = std::exp(exponent(random));
        // The value is next to where the nearest changes.
        if (random() % 2 == 0) {
          value = middles[random() % middles.size()] *
                  (1 + 1e-5 * (static_cast<double>(random() % 3) - 1));
        }
        if (is_signed && random() % 2 == 0) value = -value;
        x = static_cast<float>(value) * scale;
      }
      values[random() % kBlock] = scale;
      const Encoded encoded = Encode(GetParam(), is_signed, values);
      ASSERT_EQ(encoded.scale[0], scale);
      ASSERT_EQ(encoded, Encode(SupportedTargets().back(), is_signed, values));
      const std::vector<double> defined = DefinedValues(is_signed);
      for (size_t i = 0; i < kBlock; ++i) {
        const double value = static_cast<double>(values[i]) / scale;
        double nearest = kInfinity;
        for (double x : map) nearest = std::min(nearest, std::abs(x - value));
        // The place among 128 or 256 is computed in float32, so half way
        // between two it may be 2^-16 of their distance on the wrong side.
        ASSERT_LE(std::abs(defined[encoded.codes[i]] - value),
                  nearest * (1 + 0x1p-13) + 1e-6 * std::abs(value))
            << value;
      }
    }
  }
}

// The test takes every value from the first one that is not 0 on.
TEST(DynamicMapTest, EstimatesTheDecadeOrTheOneBelow) {
  for (const DynamicMap* map : {&kSignedMap, &kUnsignedMap}) {
    const auto estimate = [&](uint32_t bits) {
      const auto upper = static_cast<int32_t>(bits >> 16);
      return ((upper + map->decade_offset) * kDecadeFactor >> 16) % 8;
    };
    int decade = 0;
    const auto one = std::bit_cast<uint32_t>(1.0f);
    for (auto bits = std::bit_cast<uint32_t>(map->begin); bits <= one; ++bits) {
      while (std::bit_cast<float>(bits) >= map->next_begin[decade]) ++decade;
      ASSERT_LE(estimate(bits), decade) << std::bit_cast<float>(bits);
      ASSERT_GE(estimate(bits) + 1, decade) << std::bit_cast<float>(bits);
    }
    EXPECT_EQ(decade, 7);
  }
}

TEST_P(DynamicTest, ZerosAreZeroBytes) {
  const Encoded encoded = Encode(GetParam(), true, std::vector<float>(300));
  EXPECT_EQ(encoded.codes, std::vector<uint8_t>(300));
  EXPECT_EQ(encoded.scale, std::vector<float>(2));
  EXPECT_EQ(Decoded(GetParam(), true, std::vector<uint8_t>(300), {0, 5}),
            std::vector<float>(300));
}

TEST_P(DynamicTest, InfinityStaysAndTheRestOfItsBlockIsZero) {
  std::vector<float> values(300, 3.0f);
  values[7] = kInfinity;
  values[8] = -kInfinity;
  const Encoded encoded = Encode(GetParam(), true, values);
  std::vector<float> expected(300, 3.0f);
  std::fill_n(expected.begin(), 256, 0.0f);
  expected[7] = kInfinity;
  expected[8] = -kInfinity;
  EXPECT_EQ(Decoded(GetParam(), true, encoded.codes, encoded.scale), expected);
}

TEST_P(DynamicTest, NanIsAllThatItsBlockKeeps) {
  std::vector<float> values(300, 3.0f);
  values[7] = std::bit_cast<float>(0xFFF12345u);
  values[8] = kInfinity;
  const Encoded encoded = Encode(GetParam(), true, values);
  EXPECT_EQ(encoded.scale_bits[0], 0x7FC00000u);
  const std::vector<float> decoded =
      Decoded(GetParam(), true, encoded.codes, encoded.scale);
  for (size_t i = 0; i < 256; ++i) EXPECT_TRUE(std::isnan(decoded[i])) << i;
  EXPECT_EQ(decoded[256], 3);
}

TEST_P(DynamicTest, DenormalScalesAreKept) {
  const float smallest = std::numeric_limits<float>::denorm_min();
  std::vector<float> values(kBlock, smallest);
  values[3] = -8 * smallest;
  values[4] = 0;
  const Encoded encoded = Encode(GetParam(), true, values);
  EXPECT_EQ(encoded.scale[0], 8 * smallest);
  EXPECT_EQ(Decoded(GetParam(), true, encoded.codes, encoded.scale), values);
}

TEST_P(DynamicTest, EverySizeStaysWithinItsArrays) {
  for (size_t numel : {0, 1, 17, 255, 256, 257, 511, 513}) {
    const std::vector<float> ones(numel, 1.0f);
    const GuardedArray<float> in(ones);
    GuardedArray<uint8_t> codes((std::vector<uint8_t>(numel)));
    GuardedArray<float> scale(std::vector<float>((numel + 255) / 256));
    GuardedArray<float> out((std::vector<float>(numel)));
    EncodeOn(GetParam(), true, in.data(), codes.data(), scale.data(), numel);
    DecodeOn(GetParam(), true, codes.data(), scale.data(), out.data(), numel);
    EXPECT_EQ(out.elements(), ones);
    EXPECT_TRUE(codes.GuardsAreIntact() && scale.GuardsAreIntact() &&
                out.GuardsAreIntact());
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, DynamicTest,
                         testing::ValuesIn(SupportedTargets().begin(),
                                           SupportedTargets().end()),
                         [](const testing::TestParamInfo<Target>& target) {
                           return std::string(TargetName(target.param));
                         });

}  // namespace
}  // namespace optstate::kernels::cpu
