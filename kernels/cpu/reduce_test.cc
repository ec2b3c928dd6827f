#include "kernels/reduce.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/targets.h"
#include "kernels/test_seed.h"
#include "proto/types/dtype.h"

namespace optstate {
namespace {

using cpu::SumOfSquaresOn;
using cpu::SupportedTargets;
using cpu::Target;
using cpu::TargetName;

constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16,
                                DType::kFloat16};

// The definition in reduce.h, word for word.
double DefinedSum(const std::vector<float>& gradient) {
  double accumulator[16] = {};
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double element = gradient[i];
    accumulator[i % 16] += element * element;
  }
  double eight[8];
  for (int k = 0; k < 8; ++k) eight[k] = accumulator[k] + accumulator[k + 8];
  double four[4];
  for (int k = 0; k < 4; ++k) four[k] = eight[k] + eight[k + 4];
  const double even = four[0] + four[2];
  const double odd = four[1] + four[3];
  return even + odd;
}

uint64_t Bits(double value) { return std::bit_cast<uint64_t>(value); }

// Gradient elements of `dtype`, at an address aligned to the element alone,
// and the floats that they stand for.
struct Gradient {
  std::vector<uint8_t> bytes;
  std::vector<float> floats;
  const void* data() const { return bytes.data() + 4; }
};

Gradient MakeGradient(DType dtype, const std::vector<float>& values) {
  Gradient gradient;
  gradient.bytes.resize(4 + values.size() * SizeInBytes(dtype));
  gradient.floats.resize(values.size());
  CastFromFloat(dtype, values.data(), gradient.bytes.data() + 4, values.size());
  CastToFloat(dtype, gradient.data(), gradient.floats.data(), values.size());
  return gradient;
}

std::vector<float> RandomValues(size_t numel, std::mt19937* random) {
  // Spread over many magnitudes, so that the order shows in the last bits.
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-20, 4);
  std::vector<float> values(numel);
  for (float& x : values) x = normal(*random) * std::exp(exponent(*random));
  return values;
}

class SumOfSquaresTest : public testing::TestWithParam<Target> {};

TEST_P(SumOfSquaresTest, HasTheDefinedOrder) {
  std::mt19937 random(TestSeed());
  std::vector<size_t> sizes = {2047, 2048, 2049, 4095, 4096, 4097, 10007};
  for (size_t numel = 0; numel <= 70; ++numel) sizes.push_back(numel);
  for (DType dtype : kAllDTypes) {
    for (size_t numel : sizes) {
      const Gradient gradient =
          MakeGradient(dtype, RandomValues(numel, &random));
      const double sum =
          SumOfSquaresOn(GetParam(), dtype, gradient.data(), numel);
      ASSERT_EQ(Bits(sum), Bits(DefinedSum(gradient.floats)))
          << Name(dtype) << " x " << numel;
    }
  }
}

TEST_P(SumOfSquaresTest, IsNotFiniteExactlyWhenAnElementIsNot) {
  for (DType dtype : kAllDTypes) {
    for (size_t position = 0; position < 67; ++position) {
      for (float special : {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
        std::vector<float> values(67, 1.0f);
        values[position] = special;
        const Gradient gradient = MakeGradient(dtype, values);
        const double sum =
            SumOfSquaresOn(GetParam(), dtype, gradient.data(), values.size());
        ASSERT_FALSE(std::isfinite(sum)) << Name(dtype) << " " << position;
        ASSERT_EQ(std::isnan(sum), std::isnan(special));
      }
    }
  }
}

TEST_P(SumOfSquaresTest, ExtremeFloatsNeitherOverflowNorVanish) {
  const std::vector<float> largest(100, std::numeric_limits<float>::max());
  EXPECT_EQ(SumOfSquaresOn(GetParam(), DType::kFloat32, largest.data(), 100),
            DefinedSum(largest));
  const std::vector<float> smallest(100,
                                    std::numeric_limits<float>::denorm_min());
  const double sum =
      SumOfSquaresOn(GetParam(), DType::kFloat32, smallest.data(), 100);
  EXPECT_EQ(sum, DefinedSum(smallest));
  EXPECT_GT(sum, 0);
}

TEST_P(SumOfSquaresTest, NanIsTheSameEverywhere) {
  const std::vector<float> values = {std::bit_cast<float>(0xFFC12345u), 1.0f,
                                     std::numeric_limits<float>::infinity()};
  EXPECT_EQ(Bits(SumOfSquaresOn(GetParam(), DType::kFloat32, values.data(), 3)),
            Bits(std::numeric_limits<double>::quiet_NaN()));
}

INSTANTIATE_TEST_SUITE_P(Targets, SumOfSquaresTest,
                         testing::ValuesIn(SupportedTargets().begin(),
                                           SupportedTargets().end()),
                         [](const testing::TestParamInfo<Target>& target) {
                           return std::string(TargetName(target.param));
                         });

TEST(SumOfSquaresDispatchTest, UsesTheBestTarget) {
  const float values[] = {1, 2, 3};
  EXPECT_EQ(SumOfSquares(DType::kFloat32, values, 3), 14);
}

}  // namespace
}  // namespace optstate
