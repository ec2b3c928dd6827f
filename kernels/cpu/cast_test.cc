#include "kernels/cast.h"

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
#include "kernels/cpu/cast.h"
#include "kernels/cpu/guarded_array.h"
#include "kernels/cpu/guarded_input.h"
#include "kernels/cpu/guarded_slot.h"
#include "kernels/cpu/targets.h"
#include "kernels/test_seed.h"
#include "proto/types/dtype.h"

namespace optstate::kernels {
namespace {

using cpu::SupportedTargets;
using cpu::Target;
using cpu::TargetName;

constexpr DType kHalfDTypes[] = {DType::kBFloat16, DType::kFloat16};
constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16,
                                DType::kFloat16};

void AccumulateOne(Target target, DType dtype, const void* gradient, bool first,
                   float* sum, size_t numel, UndoSlot* undo) {
  cpu::AccumulateOn(target, dtype, absl::MakeConstSpan(&gradient, 1), first,
                    DType::kFloat32, sum, numel, undo);
}

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }
float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }

// The formats by their definition, in double arithmetic, which holds every
// value and every half way point of theirs exactly.
struct Format {
  int mantissa_bits;
  int exponent_min;  // of the smallest normal value
  int exponent_max;
};

Format FormatOf(DType dtype) {
  return dtype == DType::kBFloat16 ? Format{7, -126, 127} : Format{10, -14, 15};
}

double ValueOf(DType dtype, uint16_t bits) {
  const Format format = FormatOf(dtype);
  const int exponent_mask = format.exponent_max * 2 + 1;
  const int exponent = (bits & 0x7FFF) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == exponent_mask) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const int implicit = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  const int scale = format.exponent_min - format.mantissa_bits +
                    (exponent == 0 ? 0 : exponent - 1);
  return sign * std::ldexp(mantissa + implicit, scale);
}

uint16_t NanBits(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x7FC0 : 0x7E00;
}

uint16_t RoundedBits(DType dtype, float value) {
  const Format format = FormatOf(dtype);
  if (std::isnan(value)) return NanBits(dtype);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = static_cast<uint16_t>((format.exponent_max * 2 + 1)
                                                  << format.mantissa_bits);
  if (std::isinf(value)) return sign | infinity;
  const double magnitude = std::abs(static_cast<double>(value));
  int exponent = format.exponent_min;
  if (magnitude > 0) exponent = std::max(exponent, std::ilogb(magnitude));
  // nearbyint rounds to nearest even.
  const double steps =
      std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const int biased = exponent - format.exponent_min;
  const double bits =
      std::ldexp(biased, format.mantissa_bits) + steps;  // a carry included
  if (bits >= infinity) return sign | infinity;
  return sign | static_cast<uint16_t>(bits);
}

class CastTest : public testing::TestWithParam<Target> {};

TEST_P(CastTest, ToFloatIsExactForAllHalves) {
  for (DType dtype : kHalfDTypes) {
    std::vector<uint16_t> all(1 << 16);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> out(all.size());
    cpu::CastToFloatOn(GetParam(), dtype, all.data(), out.data(), all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const double truth = ValueOf(dtype, all[i]);
      if (std::isnan(truth)) {
        ASSERT_TRUE(std::isnan(out[i])) << Name(dtype) << " " << i;
      } else {
        ASSERT_EQ(Bits(out[i]), Bits(static_cast<float>(truth)))
            << Name(dtype) << " " << i;
      }
    }
  }
}

void ExpectRounded(Target target, DType dtype, const std::vector<float>& in) {
  std::vector<uint16_t> out(in.size());
  cpu::CastFromFloatOn(target, dtype, in.data(), out.data(), in.size());
  for (size_t i = 0; i < in.size(); ++i) {
    ASSERT_EQ(out[i], RoundedBits(dtype, in[i]))
        << Name(dtype) << " of " << in[i] << ", bits " << std::hex
        << Bits(in[i]);
  }
}

// The values are every sign, exponent and high mantissa with the low bits at
// which rounding to either format turns.
TEST_P(CastTest, FromFloatRoundsToNearestEven) {
  std::vector<float> in;
  for (uint32_t high = 0; high < (1 << 16); ++high) {
    for (uint32_t low :
         {0u, 1u, 0x0FFFu, 0x1000u, 0x1001u, 0x1FFFu, 0x2000u, 0x3000u, 0x7FFFu,
          0x8000u, 0x8001u, 0xF000u, 0xFFFFu}) {
      in.push_back(FromBits(high << 16 | low));
    }
  }
  for (DType dtype : kHalfDTypes) ExpectRounded(GetParam(), dtype, in);
}

// The half way points of a float16 denormal lie at other bits: take them by
// value.
TEST_P(CastTest, FromFloatRoundsTiesOfEveryHalf) {
  for (DType dtype : kHalfDTypes) {
    std::vector<float> in;
    for (uint32_t bits = 0; bits < 0x7FFF; ++bits) {
      const double value = ValueOf(dtype, static_cast<uint16_t>(bits));
      const double next = ValueOf(dtype, static_cast<uint16_t>(bits + 1));
      const float tie = static_cast<float>((value + next) / 2);
      for (float x :
           {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, HUGE_VALF)}) {
        in.push_back(x);
        in.push_back(-x);
      }
    }
    ExpectRounded(GetParam(), dtype, in);
  }
}

TEST_P(CastTest, FromFloatRoundsRandomFloats) {
  std::mt19937 random(TestSeed());
  std::vector<float> in(1 << 20);
  for (float& x : in) x = FromBits(static_cast<uint32_t>(random()));
  for (DType dtype : kHalfDTypes) ExpectRounded(GetParam(), dtype, in);
}

TEST_P(CastTest, Float32IsCopied) {
  std::mt19937 random(TestSeed());
  std::vector<float> in(1000);
  for (float& x : in) x = FromBits(static_cast<uint32_t>(random()));
  std::vector<float> up(in.size());
  std::vector<float> down(in.size());
  cpu::CastToFloatOn(GetParam(), DType::kFloat32, in.data(), up.data(),
                     in.size());
  cpu::CastFromFloatOn(GetParam(), DType::kFloat32, in.data(), down.data(),
                       in.size());
  for (size_t i = 0; i < in.size(); ++i) {
    ASSERT_EQ(Bits(up[i]), Bits(in[i]));
    ASSERT_EQ(Bits(down[i]), Bits(in[i]));
  }
}

TEST_P(CastTest, AccumulateAddsInFloat) {
  for (DType dtype : kHalfDTypes) {
    const std::vector<float> values = {1, -2.5f, 0.25f, 1e-3f, 65504, 3};
    std::vector<uint16_t> gradient(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      gradient[i] = RoundedBits(dtype, values[i]);
    }
    std::vector<float> sum(values.size(), 1e9f);
    AccumulateOne(GetParam(), dtype, gradient.data(), /*first=*/true,
                  sum.data(), sum.size(), /*undo=*/nullptr);
    for (int repeat = 0; repeat < 2; ++repeat) {
      AccumulateOne(GetParam(), dtype, gradient.data(), /*first=*/false,
                    sum.data(), sum.size(), /*undo=*/nullptr);
    }
    for (size_t i = 0; i < values.size(); ++i) {
      const float element = static_cast<float>(ValueOf(dtype, gradient[i]));
      EXPECT_EQ(sum[i], (element + element) + element);
    }
  }
}

TEST_P(CastTest, AccumulateKeepsNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> gradient = {nan, 1, infinity, -infinity};
  std::vector<float> sum = {1, nan, -infinity, -infinity};
  AccumulateOne(GetParam(), DType::kFloat32, gradient.data(),
                /*first=*/false, sum.data(), sum.size(), /*undo=*/nullptr);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Bits(sum[i]), 0x7FC00000u) << i;
  EXPECT_EQ(sum[3], -infinity);
}

// The sum is in float, whatever the gradients' dtype, and nothing behind them
// is read.
TEST_P(CastTest, AccumulateSumsSeveralGradientsFirst) {
  std::mt19937 random(TestSeed());
  std::normal_distribution<float> normal;
  for (DType dtype : kAllDTypes) {
    for (size_t numel : {1, 17, 31, 32, 1023, 1024, 1025, 2500}) {
      std::vector<GuardedInput> gradients;
      std::vector<const void*> pointers;
      std::vector<float> total(numel);
      for (int k = 0; k < 3; ++k) {
        std::vector<float> values(numel);
        for (float& x : values) x = normal(random);
        gradients.emplace_back(numel * SizeInBytes(dtype));
        CastFromFloat(dtype, values.data(), gradients[k].data(), numel);
        CastToFloat(dtype, gradients[k].data(), values.data(), numel);
        pointers.push_back(gradients[k].data());
        for (size_t i = 0; i < numel; ++i) {
          total[i] = k == 0 ? values[i] : total[i] + values[i];
        }
      }
      std::vector<float> start(numel);
      for (float& x : start) x = normal(random);
      GuardedArray<float> sum(start, numel);
      cpu::AccumulateOn(GetParam(), dtype, pointers, /*first=*/true,
                        DType::kFloat32, sum.data(), numel, /*undo=*/nullptr);
      EXPECT_EQ(sum.elements(), total);
      for (size_t i = 0; i < numel; ++i) total[i] = start[i] + total[i];
      for (bool with_undo : {false, true}) {
        GuardedSlot slot;
        GuardedArray<float> again(start, numel);
        cpu::AccumulateOn(GetParam(), dtype, pointers, /*first=*/false,
                          DType::kFloat32, again.data(), numel,
                          with_undo ? slot.get() : nullptr);
        EXPECT_EQ(again.elements(), total);
        EXPECT_TRUE(again.GuardsAreIntact());
        EXPECT_TRUE(
            slot.HoldsNothingBut(with_undo ? start : std::vector<float>()));
      }
    }
  }
}

TEST_P(CastTest, AccumulateOfSeveralGradientsMakesOneNan) {
  const float nans[] = {FromBits(0xFFF12345u), FromBits(0x7F812345u)};
  const void* const gradients[] = {nans, nans};
  float sum[2];
  cpu::AccumulateOn(GetParam(), DType::kFloat32, gradients, /*first=*/true,
                    DType::kFloat32, sum, 2, /*undo=*/nullptr);
  for (float x : sum) EXPECT_EQ(Bits(x), 0x7FC00000u);
}

// Sums of 16 bits: float(sum) + s, rounded to nearest even. Sizes around the
// vectors' and the strips' lengths, odd addresses, and the old bits saved.
TEST_P(CastTest, AccumulateRoundsToTheGradientsDType) {
  std::mt19937 random(TestSeed());
  std::normal_distribution<float> normal(0, 3);
  for (const DType dtype : kHalfDTypes) {
    for (const size_t numel : {1, 7, 16, 33, 1023, 1030, 2500}) {
      for (const size_t count : {1, 3}) {
        std::vector<std::vector<uint16_t>> gradients(count);
        std::vector<const void*> pointers;
        for (auto& gradient : gradients) {
          for (size_t i = 0; i < numel; ++i) {
            gradient.push_back(RoundedBits(dtype, normal(random)));
          }
          pointers.push_back(gradient.data());
        }
        GuardedArray<uint16_t> sum(std::vector<uint16_t>(numel, 0x7FFF), numel);
        cpu::AccumulateOn(GetParam(), dtype, pointers, /*first=*/true, dtype,
                          sum.data(), numel, /*undo=*/nullptr);
        std::vector<uint16_t> first(numel);
        std::vector<uint16_t> twice(numel);
        for (size_t i = 0; i < numel; ++i) {
          float s = static_cast<float>(ValueOf(dtype, gradients[0][i]));
          for (size_t k = 1; k < count; ++k) {
            s += static_cast<float>(ValueOf(dtype, gradients[k][i]));
          }
          first[i] = RoundedBits(dtype, s);
          twice[i] = RoundedBits(
              dtype, static_cast<float>(ValueOf(dtype, first[i])) + s);
        }
        ASSERT_EQ(sum.elements(), first);
        for (const bool with_undo : {false, true}) {
          GuardedSlot slot;
          GuardedArray<uint16_t> again(first, numel);
          cpu::AccumulateOn(GetParam(), dtype, pointers, /*first=*/false, dtype,
                            again.data(), numel,
                            with_undo ? slot.get() : nullptr);
          ASSERT_EQ(again.elements(), twice);
          EXPECT_TRUE(again.GuardsAreIntact());
          EXPECT_TRUE(slot.HoldsNothingBut(
              with_undo ? first : std::vector<uint16_t>()));
        }
      }
    }
    uint16_t nan_sum[2] = {0, 0x0001};
    const uint16_t nans[2] = {0xFFFF, 0x7FFF};
    const void* const pointer = nans;
    for (const bool first : {true, false}) {
      cpu::AccumulateOn(GetParam(), dtype, {&pointer, 1}, first, dtype, nan_sum,
                        2, /*undo=*/nullptr);
      for (const uint16_t sum : nan_sum) {
        EXPECT_EQ(sum, RoundedBits(dtype, FromBits(0x7FC00000u)));
      }
    }
  }
}

// The arrays have sizes around the vectors' lengths and odd addresses, and
// nothing is written beside them.
TEST_P(CastTest, EverySizeStaysWithinItsArray) {
  for (DType dtype : kHalfDTypes) {
    for (size_t numel = 0; numel <= 70; ++numel) {
      std::vector<float> values(numel);
      for (size_t i = 0; i < numel; ++i) values[i] = static_cast<float>(i) + 1;
      const GuardedArray<float> in(values, numel);
      GuardedArray<uint16_t> halves(std::vector<uint16_t>(numel), numel);
      GuardedArray<float> out(std::vector<float>(numel), numel);
      cpu::CastFromFloatOn(GetParam(), dtype, in.data(), halves.data(), numel);
      cpu::CastToFloatOn(GetParam(), dtype, halves.data(), out.data(), numel);
      EXPECT_EQ(out.elements(), values);
      AccumulateOne(GetParam(), dtype, halves.data(), /*first=*/false,
                    out.data(), numel, /*undo=*/nullptr);
      for (float& value : values) value *= 2;
      EXPECT_EQ(out.elements(), values);
      GuardedSlot slot;
      AccumulateOne(GetParam(), dtype, halves.data(), /*first=*/false,
                    out.data(), numel, slot.get());
      EXPECT_TRUE(slot.HoldsNothingBut(values));
      for (float& value : values) value *= 1.5f;
      EXPECT_EQ(out.elements(), values);
      EXPECT_TRUE(halves.GuardsAreIntact() && out.GuardsAreIntact());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, CastTest,
                         testing::ValuesIn(SupportedTargets().begin(),
                                           SupportedTargets().end()),
                         [](const testing::TestParamInfo<Target>& target) {
                           return std::string(TargetName(target.param));
                         });

TEST(CastDispatchTest, UsesTheBestTarget) {
  for (DType dtype : kAllDTypes) {
    const float in[] = {1, -2, 3};
    float halves[3];
    float out[3];
    CastFromFloat(dtype, in, halves, 3);
    CastToFloat(dtype, halves, out, 3);
    Accumulate(dtype, halves, /*first=*/false, out, 3);
    EXPECT_EQ(out[0], 2);
    EXPECT_EQ(out[1], -4);
    EXPECT_EQ(out[2], 6);
  }
}

}  // namespace
}  // namespace optstate::kernels
