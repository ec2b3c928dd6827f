#include "kernels/reduce.h"

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
#include "kernels/cast.h"
#include "kernels/cpu/guarded_input.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/targets.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "proto/types/dtype.h"

namespace optstate::kernels {
namespace {

using cpu::SupportedTargets;
using cpu::Target;
using cpu::TargetName;

constexpr Reduction kAllReductions[] = {Reduction::kSumOfSquares,
                                        Reduction::kSumOfAbsolutes,
                                        Reduction::kLargestAbsolute};

double Together(Reduction reduction, double a, double b) {
  if (reduction == Reduction::kLargestAbsolute) return std::max(a, b);
  return a + b;
}

// Computes the definition in reduce.h, word for word, for numbers.
double Defined(Reduction reduction, const std::vector<float>& gradient) {
  double accumulator[16] = {};
  for (size_t i = 0; i < gradient.size(); ++i) {
    double element = std::abs(static_cast<double>(gradient[i]));
    if (reduction == Reduction::kSumOfSquares) element *= element;
    double& taken = accumulator[i % 16];
    taken = Together(reduction, taken, element);
  }
  for (int half : {8, 4, 2, 1}) {
    for (int k = 0; k < half; ++k) {
      accumulator[k] =
          Together(reduction, accumulator[k], accumulator[k + half]);
    }
  }
  return accumulator[0];
}

double ReduceOne(Target target, Reduction reduction, DType dtype,
                 const void* gradient, size_t numel) {
  return cpu::ReduceOn(target, reduction, dtype,
                       absl::MakeConstSpan(&gradient, 1), numel);
}

uint64_t Bits(double value) { return std::bit_cast<uint64_t>(value); }

// Gradient elements of `dtype`, behind which nothing may be read, and the
// floats that they stand for.
struct Gradient {
  GuardedInput bytes;
  std::vector<float> floats;
  const void* data() const { return bytes.data(); }
};

Gradient MakeGradient(DType dtype, const std::vector<float>& values) {
  Gradient gradient{GuardedInput(values.size() * SizeInBytes(dtype)),
                    std::vector<float>(values.size())};
  CastFromFloat(dtype, values.data(), gradient.bytes.data(), values.size());
  CastToFloat(dtype, gradient.data(), gradient.floats.data(), values.size());
  return gradient;
}

std::vector<float> RandomValues(size_t numel, std::mt19937* random) {
  // The values spread over many magnitudes, so that the order shows in the last
  // bits.
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-20, 4);
  std::vector<float> values(numel);
  for (float& x : values) x = normal(*random) * std::exp(exponent(*random));
  return values;
}

class ReduceTest : public testing::TestWithParam<Target> {};

TEST_P(ReduceTest, HasTheDefinedOrder) {
  std::mt19937 random(TestSeed());
  std::vector<size_t> sizes = {2047, 2048, 2049, 4095, 4096, 4097, 10007};
  for (size_t numel = 0; numel <= 70; ++numel) sizes.push_back(numel);
  for (Reduction reduction : kAllReductions) {
    for (DType dtype : kAllDTypes) {
      for (size_t numel : sizes) {
        const Gradient gradient =
            MakeGradient(dtype, RandomValues(numel, &random));
        ASSERT_EQ(Bits(ReduceOne(GetParam(), reduction, dtype, gradient.data(),
                                 numel)),
                  Bits(Defined(reduction, gradient.floats)))
            << Name(dtype) << " x " << numel;
      }
    }
  }
}

TEST_P(ReduceTest, SeveralGradientsAreSummedInFloatFirst) {
  std::mt19937 random(TestSeed());
  for (Reduction reduction : kAllReductions) {
    for (DType dtype : kAllDTypes) {
      for (size_t numel : {1, 15, 16, 17, 2047, 2048, 2049, 4097}) {
        std::vector<Gradient> gradients;
        std::vector<const void*> pointers;
        std::vector<float> sum;
        for (int k = 0; k < 3; ++k) {
          gradients.push_back(
              MakeGradient(dtype, RandomValues(numel, &random)));
          const std::vector<float>& floats = gradients.back().floats;
          if (k == 0) sum = floats;
          for (size_t i = 0; k > 0 && i < numel; ++i) sum[i] += floats[i];
        }
        pointers.reserve(gradients.size());
        for (const Gradient& gradient : gradients) {
          pointers.push_back(gradient.data());
        }
        ASSERT_EQ(
            Bits(cpu::ReduceOn(GetParam(), reduction, dtype, pointers, numel)),
            Bits(Defined(reduction, sum)))
            << Name(dtype) << " x " << numel;
      }
    }
  }
}

TEST_P(ReduceTest, IsNotFiniteExactlyWhenAnElementIsNot) {
  for (Reduction reduction : kAllReductions) {
    for (DType dtype : kAllDTypes) {
      for (size_t position = 0; position < 67; ++position) {
        for (float special : {std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
          std::vector<float> values(67, 1.0f);
          values[position] = special;
          // A NaN wins, wherever infinity is.
          if (std::isnan(special)) {
            values[(position + 16) % 67] =
                std::numeric_limits<float>::infinity();
          }
          const Gradient gradient = MakeGradient(dtype, values);
          const double result = ReduceOne(GetParam(), reduction, dtype,
                                          gradient.data(), values.size());
          ASSERT_FALSE(std::isfinite(result)) << Name(dtype) << " " << position;
          ASSERT_EQ(std::isnan(result), std::isnan(special));
        }
      }
    }
  }
}

TEST_P(ReduceTest, ExtremeFloatsNeitherOverflowNorVanish) {
  for (Reduction reduction : kAllReductions) {
    for (float extreme : {std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::denorm_min()}) {
      const std::vector<float> values(100, extreme);
      const double result =
          ReduceOne(GetParam(), reduction, DType::kFloat32, values.data(), 100);
      EXPECT_EQ(result, Defined(reduction, values));
      EXPECT_TRUE(result > 0 && std::isfinite(result));
    }
  }
}

TEST_P(ReduceTest, NanIsTheSameEverywhere) {
  const std::vector<float> values = {std::bit_cast<float>(0xFFC12345u), 1.0f,
                                     std::numeric_limits<float>::infinity()};
  for (Reduction reduction : kAllReductions) {
    EXPECT_EQ(Bits(ReduceOne(GetParam(), reduction, DType::kFloat32,
                             values.data(), 3)),
              Bits(std::numeric_limits<double>::quiet_NaN()));
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, ReduceTest,
                         testing::ValuesIn(SupportedTargets().begin(),
                                           SupportedTargets().end()),
                         [](const testing::TestParamInfo<Target>& target) {
                           return std::string(TargetName(target.param));
                         });

TEST(ReduceDispatchTest, UsesTheBestTarget) {
  const float values[] = {1, 2, 3};
  EXPECT_EQ(SumOfSquares(DType::kFloat32, values, 3), 14);
  const void* const gradients[] = {values, values};
  EXPECT_EQ(Reduce(Reduction::kSumOfAbsolutes, DType::kFloat32, gradients, 3),
            12);
}

}  // namespace
}  // namespace optstate::kernels
