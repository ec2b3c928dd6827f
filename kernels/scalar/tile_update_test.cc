// Tests the form of each rule that updates one float at a time against
// Highway's on every target, bit by bit. Whether their bits are right is for
// update_kernel_test.cc and golden_bits_test.cc.

#include "kernels/scalar/tile_update.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/rule_calls.h"
#include "kernels/cpu/targets.h"
#include "kernels/reduction.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

namespace optstate::kernels::scalar {
namespace {

using cpu::Element;
using cpu::Result;
using cpu::SupportedTargets;
using cpu::Target;

// Returns a kernel for every combination of dtypes and formats.
std::vector<UpdateKernelKey> EveryKey() {
  std::vector<UpdateKernelKey> keys;
  for (const auto& [kind, options] : AllVariants()) {
    for (StateFormat state : {StateFormat::kFloat32, StateFormat::kBFloat16,
                              StateFormat::kDynamic8}) {
      for (DType gradient : kAllDTypes) {
        for (DType parameter : kAllDTypes) {
          keys.push_back({kind, options, gradient, parameter, state});
        }
        keys.push_back({kind, options, gradient, DType::kBFloat16, state,
                        MasterFormat::kSplit});
      }
    }
  }
  return keys;
}

// The last elements that share the upper half of their flat position are among
// those of a call.
constexpr uint64_t kFlatBegin = (uint64_t{3} << 32) - 40;

Result ApplyElementByElement(const UpdateKernelKey& key,
                             const UpdateFactors& factors,
                             const std::vector<Element>& elements) {
  return cpu::Apply({.target = cpu::PlainTarget(),
                     .flat_begin = kFlatBegin,
                     .apply = &UpdateTile},
                    key, factors, elements);
}

class TileUpdateTest : public testing::TestWithParam<UpdateKernelKey> {};

TEST_P(TileUpdateTest, IsWhatEveryTargetDoes) {
  const UpdateKernelKey& key = GetParam();
  std::mt19937 random(TestSeed());
  for (const auto& [name, hyperparams] : SettingsOf(cpu::VariantOf(key))) {
    for (int64_t step_count : {1, 7}) {
      const UpdateFactors factors =
          cpu::Factors(key, hyperparams, step_count, /*gradient_limit=*/0.5);
      for (size_t numel : {0, 1, 2, 15, 17, 31, 33, 67, 255, 256, 257, 771}) {
        const std::vector<Element> elements =
            cpu::RandomElements(numel, &random);
        const Result expected = ApplyElementByElement(key, factors, elements);
        for (Target target : SupportedTargets()) {
          ASSERT_EQ(cpu::Apply({.target = target, .flat_begin = kFlatBegin},
                               key, factors, elements),
                    expected)
              << cpu::TargetName(target) << " x " << numel << " " << name;
        }
      }
    }
  }
}

// The halves of a rule have a plain form for whole pairs of vectors; a special
// value among them must give what it gives here, where there is none.
TEST_P(TileUpdateTest, ElementsOfAWholeTileAreThoseOfEveryTarget) {
  const UpdateKernelKey& key = GetParam();
  std::mt19937 random(TestSeed());
  std::vector<Element> elements = cpu::RandomElements(4096, &random);
  for (size_t i = 0; i < elements.size(); ++i) {
    if (i % 300 == 0) continue;
    elements[i] = {cpu::RandomNormal(&random),
                   cpu::RandomNormal(&random),
                   {cpu::RandomNormal(&random), 1, 2}};
  }
  const UpdateFactors factors = cpu::Factors(
      key, SettingsOf(cpu::VariantOf(key))[0].hyperparams, /*step_count=*/3);
  const Result expected = ApplyElementByElement(key, factors, elements);
  for (Target target : SupportedTargets()) {
    ASSERT_EQ(cpu::Apply({.target = target, .flat_begin = kFlatBegin}, key,
                         factors, elements),
              expected)
        << cpu::TargetName(target);
  }
}

TEST_P(TileUpdateTest, GradientsAreSummedInOrder) {
  const UpdateKernelKey& key = GetParam();
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = cpu::FirstFactors(key);
  const std::vector<Element> elements = cpu::RandomElements(300, &random);
  cpu::Gradients<float> gradients(3);
  for (auto& gradient : gradients) {
    for (size_t i = 0; i < elements.size(); ++i) {
      gradient.push_back(cpu::RandomElement(&random).gradient);
    }
  }
  const Result expected =
      cpu::ApplySum(key, factors, elements, gradients,
                    {.target = cpu::PlainTarget(), .apply = &UpdateTile});
  for (Target target : SupportedTargets()) {
    ASSERT_EQ(cpu::ApplySum(key, factors, elements, gradients, {target}),
              expected)
        << cpu::TargetName(target);
  }
}

// Scales without a reciprocal: all of a block's values are denormal or huge.
TEST_P(TileUpdateTest, BlocksOfExtremeValues) {
  const UpdateKernelKey& key = GetParam();
  if (key.state != StateFormat::kDynamic8) return;
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = cpu::FirstFactors(key);
  for (float size : {1e-42f, 1e-39f, 3e38f}) {
    std::vector<Element> elements(512);
    for (Element& element : elements) {
      std::uniform_real_distribution<float> fraction(-1, 1);
      element.gradient = fraction(random) * 1e-22f;
      element.master = fraction(random);
      element.state[0] = fraction(random) * size;
      element.state[1] = element.state[2] = std::abs(element.state[0]);
    }
    const Result expected = ApplyElementByElement(key, factors, elements);
    for (Target target : SupportedTargets()) {
      ASSERT_EQ(cpu::Apply({.target = target, .flat_begin = kFlatBegin}, key,
                           factors, elements),
                expected)
          << cpu::TargetName(target) << " " << size;
    }
  }
}

std::string NameOfTest(const testing::TestParamInfo<UpdateKernelKey>& key) {
  return cpu::NameOfKey(key.param);
}

INSTANTIATE_TEST_SUITE_P(Keys, TileUpdateTest, testing::ValuesIn(EveryKey()),
                         NameOfTest);

TEST(UpdateTileTest, KnowsNoOptimizerOfWholeParameters) {
  EXPECT_FALSE(UpdateTile({.optimizer = OptimizerKind::kMuon}, {}, {}));
}

uint64_t Bits(double value) { return std::bit_cast<uint64_t>(value); }

class ReduceElementsTest : public testing::TestWithParam<DType> {};

TEST_P(ReduceElementsTest, IsWhatEveryTargetDoes) {
  std::mt19937 random(TestSeed());
  for (size_t numel : {0, 1, 15, 16, 17, 31, 255, 2047, 2048, 2049, 4099}) {
    for (bool has_specials : {false, true}) {
      for (size_t count : {1, 3}) {
        std::vector<std::vector<uint16_t>> halves(count);
        std::vector<std::vector<float>> floats(count);
        std::vector<const void*> gradients;
        for (size_t k = 0; k < count; ++k) {
          for (size_t i = 0; i < numel; ++i) {
            floats[k].push_back(has_specials
                                    ? cpu::RandomElement(&random).gradient
                                    : cpu::RandomNormal(&random));
          }
          if (GetParam() == DType::kFloat32) {
            gradients.push_back(floats[k].data());
          } else {
            halves[k] = cpu::HalvesOf(GetParam(), floats[k]);
            gradients.push_back(halves[k].data());
          }
        }
        for (Reduction reduction :
             {Reduction::kSumOfSquares, Reduction::kSumOfAbsolutes,
              Reduction::kLargestAbsolute}) {
          const double expected =
              ReduceElements(reduction, GetParam(), gradients, numel);
          for (Target target : SupportedTargets()) {
            EXPECT_EQ(Bits(cpu::ReduceOn(target, reduction, GetParam(),
                                         gradients, numel)),
                      Bits(expected))
                << cpu::TargetName(target) << " x " << numel;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, ReduceElementsTest,
                         testing::ValuesIn(kAllDTypes));

}  // namespace
}  // namespace optstate::kernels::scalar
