#include "client/collective/sum.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "client/collective/half_floats.h"
#include "client/collective/testing/elements.h"
#include "client/fake/fake_arithmetic.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

TEST(HalfFloats, EveryValueComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float from_bfloat16 = FloatFromBFloat16(half);
    EXPECT_EQ(BFloat16FromFloat(from_bfloat16),
              std::isnan(from_bfloat16) ? 0x7FC0 : half);
    const float from_float16 = FloatFromFloat16(half);
    EXPECT_EQ(Float16FromFloat(from_float16),
              std::isnan(from_float16) ? 0x7E00 : half);
    const auto* const bytes = reinterpret_cast<const std::byte*>(&half);
    if (std::isnan(from_float16)) continue;
    EXPECT_EQ(from_float16, LoadElement(DType::kFloat16, bytes, 0)) << bits;
  }
}

// Rounds as the model of the daemon does, which is written another way.
TEST(HalfFloats, RoundToNearestEven) {
  std::mt19937 draw(static_cast<uint32_t>(ScriptSeed()));
  for (int i = 0; i < 200'000; ++i) {
    const auto bits = static_cast<uint32_t>(draw());
    const float value = absl::bit_cast<float>(bits);
    if (std::isnan(value)) continue;
    uint16_t expected = 0;
    auto* const bytes = reinterpret_cast<std::byte*>(&expected);
    StoreElement(DType::kBFloat16, bytes, 0, value);
    ASSERT_EQ(BFloat16FromFloat(value), expected) << value;
    StoreElement(DType::kFloat16, bytes, 0, value);
    ASSERT_EQ(Float16FromFloat(value), expected) << value;
  }
  // Ties and the ends of the ranges of float16.
  EXPECT_EQ(Float16FromFloat(65519.996f), 0x7BFF);
  EXPECT_EQ(Float16FromFloat(65520.0f), 0x7C00);
  EXPECT_EQ(Float16FromFloat(-0x1p-25f), 0x8000);
  EXPECT_EQ(Float16FromFloat(0x1.8p-24f), 0x0002);
  EXPECT_EQ(Float16FromFloat(0x1p-14f), 0x0400);
}

TEST(SumInOrder, AddsInOrderAndInPlace) {
  const std::vector<float> values = {1e8f, 3.0f, 3.0f};
  std::vector<std::vector<std::byte>> arrays;
  for (const float value : values) {
    arrays.push_back(
        Elements(ElementType::kFloat32, 1500, [&](size_t) { return value; }));
  }
  const std::vector<std::byte> forward =
      Elements(ElementType::kFloat32, 1500,
               [&](size_t) { return (values[0] + values[1]) + values[2]; });
  const std::vector<std::byte> backward =
      Elements(ElementType::kFloat32, 1500,
               [&](size_t) { return (values[2] + values[1]) + values[0]; });
  ASSERT_NE(forward, backward);
  std::vector<std::byte> out(1500 * 4);
  SumInOrder(ElementType::kFloat32,
             {arrays[2].data(), arrays[1].data(), arrays[0].data()}, 1500,
             out.data());
  EXPECT_EQ(out, backward);
  SumInOrder(ElementType::kFloat32,
             {arrays[0].data(), arrays[1].data(), arrays[2].data()}, 1500,
             arrays[1].data());
  EXPECT_EQ(arrays[1], forward);
}

TEST(SumInOrder, Uint8IsModulo256) {
  const uint8_t a = 200;
  const uint8_t b = 100;
  uint8_t out = 0;
  SumInOrder(ElementType::kUint8,
             {reinterpret_cast<const std::byte*>(&a),
              reinterpret_cast<const std::byte*>(&b)},
             1, reinterpret_cast<std::byte*>(&out));
  EXPECT_EQ(out, 44);
}

TEST(SumInOrder, NanAndInfStay) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> a = {1, infinity, 1};
  const std::vector<float> b = {std::nanf(""), 2, infinity};
  std::vector<float> out(3);
  SumInOrder(ElementType::kFloat32,
             {reinterpret_cast<const std::byte*>(a.data()),
              reinterpret_cast<const std::byte*>(b.data())},
             3, reinterpret_cast<std::byte*>(out.data()));
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], infinity);
  EXPECT_EQ(out[2], infinity);
}

}  // namespace
}  // namespace optstate::client
