// Every target against the one without SIMD, bit by bit. Whether that one is
// right is for update_kernel_test.cc.

#include "kernels/cpu/adam.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/guarded_array.h"
#include "kernels/cpu/guarded_slot.h"
#include "kernels/cpu/targets.h"
#include "kernels/hyperparams.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer_kind.h"

namespace optstate::cpu {
namespace {

constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16,
                                DType::kFloat16};

Target PlainTarget() { return SupportedTargets().back(); }

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

std::vector<UpdateKernelKey> AllKeys() {
  std::vector<UpdateKernelKey> keys;
  for (OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW}) {
    for (bool amsgrad : {false, true}) {
      for (DType gradient : kAllDTypes) {
        for (DType parameter : kAllDTypes) {
          keys.push_back({kind, amsgrad, gradient, parameter});
        }
      }
    }
  }
  return keys;
}

std::string NameOf(const UpdateKernelKey& key) {
  return absl::StrCat(key.optimizer == OptimizerKind::kAdam ? "Adam" : "AdamW",
                      key.amsgrad ? "Amsgrad" : "", "_", Name(key.gradient),
                      "_", Name(key.parameter));
}

// Settings that reach every branch of the arithmetic.
std::vector<Hyperparams> AllHyperparams() {
  Hyperparams decay;
  decay.weight_decay = 0.1;
  Hyperparams ascent = decay;
  ascent.maximize = true;
  ascent.lr = 0.5;
  Hyperparams small_betas;
  small_betas.beta1 = 0;
  small_betas.beta2 = 0.25;
  small_betas.eps = 0;
  return {Hyperparams(), decay, ascent, small_betas};
}

// One element as the kernel reads it; each part as the bits of its dtype.
struct Element {
  float gradient = 0;
  float master = 0;
  float state[kMaxStateArrays] = {};
};

// What a kernel wrote.
struct Result {
  std::vector<uint32_t> master;
  std::vector<uint32_t> state[kMaxStateArrays];
  std::vector<uint32_t> parameter;

  bool operator==(const Result& other) const = default;
};

template <typename T>
std::vector<uint32_t> BitsOf(const GuardedArray<T>& array) {
  std::vector<uint32_t> bits;
  for (T element : array.elements()) {
    if constexpr (sizeof(T) == 4) {
      bits.push_back(Bits(element));
    } else {
      bits.push_back(element);
    }
  }
  return bits;
}

template <typename Gradient, typename Parameter>
Result ApplyToArrays(const UpdateKernel& kernel, const UpdateFactors& factors,
                     const std::vector<Element>& elements,
                     const std::vector<Gradient>& gradients, bool with_undo) {
  const size_t numel = elements.size();
  const size_t states = kernel.state_array_names.size();
  std::vector<float> masters;
  std::vector<float> state_values[kMaxStateArrays];
  for (const Element& element : elements) {
    masters.push_back(element.master);
    for (size_t k = 0; k < states; ++k) {
      state_values[k].push_back(element.state[k]);
    }
  }
  // Different shifts, so that no two arrays are aligned alike.
  const GuardedArray<Gradient> gradient(gradients, 1);
  GuardedArray<float> master(masters, 3);
  GuardedArray<float> state[kMaxStateArrays] = {
      GuardedArray<float>(state_values[0], 5),
      GuardedArray<float>(state_values[1], 7),
      GuardedArray<float>(state_values[2], 9)};
  GuardedArray<Parameter> parameter(std::vector<Parameter>(numel), 11);

  TileView view;
  view.gradient = gradient.data();
  view.parameter = parameter.data();
  view.master = master.data();
  for (size_t k = 0; k < states; ++k) view.state[k] = state[k].data();
  view.numel = numel;
  if (with_undo) {
    GuardedSlot slot;
    view.undo = slot.get();
    kernel.apply(factors, view);
    EXPECT_TRUE(slot.HoldsTheEndOf(
        {masters, state_values[0], state_values[1], state_values[2]}));
  } else {
    kernel.apply(factors, view);
  }

  EXPECT_TRUE(gradient.GuardsAreIntact() && master.GuardsAreIntact() &&
              parameter.GuardsAreIntact());
  Result result;
  result.master = BitsOf(master);
  for (int k = 0; k < kMaxStateArrays; ++k) {
    EXPECT_TRUE(state[k].GuardsAreIntact());
    result.state[k] = BitsOf(state[k]);
  }
  result.parameter = BitsOf(parameter);
  return result;
}

Result Apply(Target target, const UpdateKernelKey& key,
             const UpdateFactors& factors, const std::vector<Element>& elements,
             bool with_undo = false) {
  const UpdateKernel& kernel = *AdamKernel(key, target);
  std::vector<float> gradients;
  for (const Element& element : elements) gradients.push_back(element.gradient);
  std::vector<uint16_t> halves(gradients.size());
  const bool gradient_is_float = key.gradient == DType::kFloat32;
  const bool parameter_is_float = key.parameter == DType::kFloat32;
  if (!gradient_is_float) {
    CastFromFloatOn(PlainTarget(), key.gradient, gradients.data(),
                    halves.data(), halves.size());
  }
  if (gradient_is_float && parameter_is_float) {
    return ApplyToArrays<float, float>(kernel, factors, elements, gradients,
                                       with_undo);
  }
  if (gradient_is_float) {
    return ApplyToArrays<float, uint16_t>(kernel, factors, elements, gradients,
                                          with_undo);
  }
  if (parameter_is_float) {
    return ApplyToArrays<uint16_t, float>(kernel, factors, elements, halves,
                                          with_undo);
  }
  return ApplyToArrays<uint16_t, uint16_t>(kernel, factors, elements, halves,
                                           with_undo);
}

UpdateFactors Factors(const UpdateKernelKey& key,
                      const Hyperparams& hyperparams) {
  return AdamKernel(key, PlainTarget())->prepare(hyperparams, 3, 0.37);
}

float RandomNormal(std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-25, 5);
  return normal(*random) * std::exp(exponent(*random));
}

// Mostly what training sees; one in four are random bits: NaN, infinities,
// denormals, huge values.
Element RandomElement(std::mt19937* random) {
  Element element;
  element.gradient = RandomNormal(random);
  element.master = RandomNormal(random);
  element.state[0] = RandomNormal(random);
  element.state[1] = std::abs(RandomNormal(random));
  element.state[2] = std::abs(RandomNormal(random));
  float* parts[] = {&element.gradient, &element.master, &element.state[0],
                    &element.state[1], &element.state[2]};
  if ((*random)() % 4 == 0) {
    *parts[(*random)() % 5] =
        std::bit_cast<float>(static_cast<uint32_t>((*random)()));
  }
  return element;
}

std::vector<Element> RandomElements(size_t numel, std::mt19937* random) {
  std::vector<Element> elements(numel);
  for (Element& element : elements) element = RandomElement(random);
  return elements;
}

class AdamTest : public testing::TestWithParam<UpdateKernelKey> {};

TEST_P(AdamTest, EveryTargetGivesEqualBitsAtEverySize) {
  std::mt19937 random(TestSeed());
  std::vector<size_t> sizes = {4095, 4096, 4097};
  for (size_t numel = 0; numel <= 70; ++numel) sizes.push_back(numel);
  for (const Hyperparams& hyperparams : AllHyperparams()) {
    const UpdateFactors factors = Factors(GetParam(), hyperparams);
    for (size_t numel : sizes) {
      const std::vector<Element> elements = RandomElements(numel, &random);
      const Result plain = Apply(PlainTarget(), GetParam(), factors, elements);
      for (Target target : SupportedTargets()) {
        ASSERT_EQ(Apply(target, GetParam(), factors, elements), plain)
            << TargetName(target) << " x " << numel;
        ASSERT_EQ(Apply(target, GetParam(), factors, elements,
                        /*with_undo=*/true),
                  plain)
            << TargetName(target) << " with undo x " << numel;
      }
    }
  }
}

// An element's result depends on that element alone, whatever its lane.
TEST_P(AdamTest, SpecialValuesStayInTheirLane) {
  constexpr size_t kNumel = 37;
  std::mt19937 random(TestSeed());
  Hyperparams hyperparams;
  hyperparams.weight_decay = 0.1;
  const UpdateFactors factors = Factors(GetParam(), hyperparams);
  std::vector<Element> ordinary(kNumel);
  for (Element& element : ordinary) {
    element = {1, RandomNormal(&random), {RandomNormal(&random), 1, 1}};
  }
  const Result expected = Apply(PlainTarget(), GetParam(), factors, ordinary);
  const float specials[] = {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max()};
  for (float special : specials) {
    Element all_special;
    all_special.gradient = all_special.master = special;
    for (float& state : all_special.state) state = special;
    const Result alone =
        Apply(PlainTarget(), GetParam(), factors, {all_special});
    for (size_t position = 0; position < kNumel; ++position) {
      std::vector<Element> elements = ordinary;
      elements[position] = all_special;
      Result spliced = expected;
      spliced.master[position] = alone.master[0];
      spliced.parameter[position] = alone.parameter[0];
      for (int k = 0; k < kMaxStateArrays; ++k) {
        if (!alone.state[k].empty()) {
          spliced.state[k][position] = alone.state[k][0];
        }
      }
      for (Target target : SupportedTargets()) {
        ASSERT_EQ(Apply(target, GetParam(), factors, elements), spliced)
            << TargetName(target) << " " << special << " at " << position;
      }
    }
  }
}

// The parameter is the master, rounded as CastFromFloat rounds.
TEST_P(AdamTest, ParameterIsTheMasterRounded) {
  std::mt19937 random(TestSeed());
  const std::vector<Element> elements = RandomElements(1000, &random);
  const Result result = Apply(BestTarget(), GetParam(),
                              Factors(GetParam(), Hyperparams()), elements);
  if (GetParam().parameter == DType::kFloat32) {
    EXPECT_EQ(result.parameter, result.master);
    return;
  }
  std::vector<uint16_t> rounded(elements.size());
  const auto* master = reinterpret_cast<const float*>(result.master.data());
  CastFromFloatOn(PlainTarget(), GetParam().parameter, master, rounded.data(),
                  rounded.size());
  EXPECT_EQ(result.parameter,
            std::vector<uint32_t>(rounded.begin(), rounded.end()));
}

// NaN has many bit patterns and each CPU makes its own; ours writes one.
TEST_P(AdamTest, NanIsCanonical) {
  Element element = {std::bit_cast<float>(0xFFF12345u), 1, {1, 1, 1}};
  const Result result = Apply(BestTarget(), GetParam(),
                              Factors(GetParam(), Hyperparams()), {element});
  EXPECT_EQ(result.master[0], 0x7FC00000u);
  EXPECT_EQ(result.state[0][0], 0x7FC00000u);
  EXPECT_EQ(result.state[1][0], 0x7FC00000u);
}

INSTANTIATE_TEST_SUITE_P(Keys, AdamTest, testing::ValuesIn(AllKeys()),
                         [](const auto& key) { return NameOf(key.param); });

}  // namespace
}  // namespace optstate::cpu
