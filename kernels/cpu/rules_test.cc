// Tests every target against the one without SIMD, bit by bit. Whether that one
// is right is for update_kernel_test.cc.

#include "kernels/cpu/rules.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/dynamic.h"
#include "kernels/cpu/rule_calls.h"
#include "kernels/cpu/targets.h"
#include "kernels/random_bits.h"
#include "kernels/split_master.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cpu {
namespace {

class RulesTest : public testing::TestWithParam<UpdateKernelKey> {};

TEST_P(RulesTest, EveryTargetGivesEqualBitsAtEverySize) {
  std::mt19937 random(TestSeed());
  std::vector<size_t> sizes = {4095, 4096, 4097};
  for (size_t numel = 0; numel <= 70; ++numel) sizes.push_back(numel);
  for (const auto& [name, hyperparams] : SettingsOf(VariantOf(GetParam()))) {
    for (int64_t step_count : {1, 7}) {
      const UpdateFactors factors =
          Factors(GetParam(), hyperparams, step_count, /*gradient_limit=*/0.5);
      // The first step is the same but for one factor.
      if (step_count == 1) sizes.resize(40);
      for (size_t numel : sizes) {
        const std::vector<Element> elements = RandomElements(numel, &random);
        const Result plain = ApplyPlainly(GetParam(), factors, elements);
        for (Target target : SupportedTargets()) {
          ASSERT_EQ(Apply({target}, GetParam(), factors, elements), plain)
              << TargetName(target) << " x " << numel << " " << name;
          ASSERT_EQ(Apply({target, /*with_undo=*/true}, GetParam(), factors,
                          elements),
                    plain)
              << TargetName(target) << " with undo x " << numel << " " << name;
        }
      }
    }
  }
}

TEST_P(RulesTest, CuttingAViewInTwoChangesNothing) {
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = FirstFactors(GetParam());
  const std::vector<Element> elements = RandomElements(600, &random);
  const Result whole = ApplyPlainly(GetParam(), factors, elements);
  for (Target target : SupportedTargets()) {
    for (size_t cut : {1, 3, 16, 31, 255, 256, 257, 512, 599, 600}) {
      const bool is_cut_in_block =
          cut % kQuantizedBlockElements != 0 && cut < elements.size();
      if (GetParam().state == StateFormat::kDynamic8 && is_cut_in_block) {
        continue;
      }
      ASSERT_EQ(Apply({target, false, cut}, GetParam(), factors, elements),
                whole)
          << TargetName(target) << " at " << cut;
    }
  }
}

// A kernel of several gradients gives what the one of float gradients gives on
// their sum.
TEST_P(RulesTest, GradientsAreSummedInFloatInOrder) {
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = FirstFactors(GetParam());
  UpdateKernelKey float_key = GetParam();
  float_key.gradient = DType::kFloat32;
  for (size_t numel : {1, 17, 255, 256, 257, 512, 1000}) {
    std::vector<Element> elements = RandomElements(numel, &random);
    for (size_t count : {1, 2, 3, 5}) {
      Gradients<float> gradients(count);
      for (auto& gradient : gradients) {
        for (size_t i = 0; i < numel; ++i) {
          gradient.push_back(RandomElement(&random).gradient);
        }
      }
      for (size_t k = 0; k < count; ++k) {
        std::vector<float> rounded = gradients[k];
        if (GetParam().gradient != DType::kFloat32) {
          const auto halves = HalvesOf(GetParam().gradient, gradients[k]);
          CastToFloatOn(PlainTarget(), GetParam().gradient, halves.data(),
                        rounded.data(), numel);
        }
        for (size_t i = 0; i < numel; ++i) {
          float& sum = elements[i].gradient;
          sum = k == 0 ? rounded[i] : sum + rounded[i];
        }
      }
      const Result expected = ApplyPlainly(float_key, factors, elements);
      for (Target target : SupportedTargets()) {
        for (bool with_undo : {false, true}) {
          ASSERT_EQ(ApplySum(GetParam(), factors, elements, gradients,
                             {target, with_undo}),
                    expected)
              << TargetName(target) << " " << count << " x " << numel;
        }
      }
    }
  }
}

// An element's result depends on that element alone, whatever its lane.
TEST_P(RulesTest, SpecialValuesStayInTheirLane) {
  if (GetParam().state != StateFormat::kFloat32) return;
  constexpr size_t kNumel = 37;
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = FirstFactors(GetParam());
  std::vector<Element> ordinary(kNumel);
  for (Element& element : ordinary) {
    element = {1, RandomNormal(&random), {1, 1, RandomNormal(&random)}};
  }
  const Result expected = ApplyPlainly(GetParam(), factors, ordinary);
  const float specials[] = {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max()};
  for (float special : specials) {
    Element all_special;
    all_special.gradient = all_special.master = special;
    for (float& state : all_special.state) state = special;
    const Result alone = ApplyPlainly(GetParam(), factors, {all_special});
    for (size_t position = 0; position < kNumel; ++position) {
      std::vector<Element> elements = ordinary;
      elements[position] = all_special;
      Result spliced = expected;
      spliced.master[position] = alone.master[0];
      spliced.parameter[position] = alone.parameter[0];
      for (int k = 0; k < kStateArraysMax; ++k) {
        if (!alone.state[k].empty()) {
          spliced.state[k][position] = alone.state[k][0];
        }
      }
      for (Target target : SupportedTargets()) {
        ASSERT_EQ(Apply({target}, GetParam(), factors, elements), spliced)
            << TargetName(target) << " " << special << " at " << position;
      }
    }
  }
}

// A gradient that was scaled and cut beforehand gives what the factor and the
// limit give.
TEST_P(RulesTest, GradientsAreScaledThenCut) {
  constexpr float kLimit = 0.25f;
  if (GetParam().gradient != DType::kFloat32) return;
  std::mt19937 random(TestSeed());
  const Hyperparams hyperparams =
      SettingsOf(VariantOf(GetParam()))[0].hyperparams;
  UpdateFactors scale = Factors(GetParam(), hyperparams, 7, kLimit);
  UpdateFactors none = scale;
  none.gradient_factor = 1;
  none.gradient_limit = std::numeric_limits<float>::infinity();
  const std::vector<Element> raw = RandomElements(500, &random);
  std::vector<Element> made = raw;
  int cut = 0;
  for (Element& element : made) {
    element.gradient *= scale.gradient_factor;
    if (std::isnan(element.gradient)) continue;
    cut += std::abs(element.gradient) > kLimit;
    element.gradient = std::clamp(element.gradient, -kLimit, kLimit);
  }
  EXPECT_GT(cut, 10);
  EXPECT_EQ(ApplyPlainly(GetParam(), scale, raw),
            ApplyPlainly(GetParam(), none, made));
}

// The parameter is the master, rounded as CastFromFloat rounds.
TEST_P(RulesTest, ParameterIsTheMasterRounded) {
  std::mt19937 random(TestSeed());
  const std::vector<Element> elements = RandomElements(1000, &random);
  const Result result =
      Apply({BestTarget()}, GetParam(), FirstFactors(GetParam()), elements);
  if (GetParam().parameter == DType::kFloat32) {
    // The parameter is its own master, and no other is written.
    EXPECT_EQ(result.parameter, std::vector<uint32_t>(elements.size()));
    return;
  }
  if (IsSplit(GetParam())) {
    for (size_t i = 0; i < elements.size(); ++i) {
      EXPECT_EQ(result.parameter[i], (result.master[i] + 0x8000) >> 16);
    }
    return;
  }
  std::vector<float> master(elements.size());
  std::memcpy(master.data(), result.master.data(),
              master.size() * sizeof(float));
  const auto rounded = HalvesOf(GetParam().parameter, master);
  EXPECT_EQ(result.parameter,
            std::vector<uint32_t>(rounded.begin(), rounded.end()));
}

// A split master equals the float master bit for bit, special values too, and
// so do the parameters that do not lie half way between two.
TEST_P(RulesTest, SplitMasterIsTheFloatMaster) {
  if (!IsSplit(GetParam())) return;
  std::mt19937 random(TestSeed());
  std::vector<Element> elements = RandomElements(2000, &random);
  for (Element& element : elements) {
    if (std::isnan(element.master)) element.master = std::nanf("");
  }
  UpdateKernelKey float_key = GetParam();
  float_key.master = MasterFormat::kFloat32;
  const UpdateFactors factors = FirstFactors(GetParam());
  const Result split = Apply({BestTarget()}, GetParam(), factors, elements);
  const Result whole = Apply({BestTarget()}, float_key, factors, elements);
  EXPECT_EQ(split.master, whole.master);
  for (int k = 0; k < kStateArraysMax; ++k) {
    EXPECT_EQ(split.state[k], whole.state[k]);
    EXPECT_EQ(split.scale[k], whole.scale[k]);
  }
  for (size_t i = 0; i < elements.size(); ++i) {
    if ((whole.master[i] & 0xFFFF) == 0x8000) continue;
    EXPECT_EQ(split.parameter[i], whole.parameter[i]);
  }
}

// Every random number is that of its element, across 2^32 too.
TEST_P(RulesTest, RandomBitsAreThoseOfTheElement) {
  if (GetParam().state != StateFormat::kBFloat16) return;
  std::mt19937 random(TestSeed());
  UpdateKernelKey float_key = GetParam();
  float_key.state = StateFormat::kFloat32;
  const UpdateFactors factors = FirstFactors(GetParam());
  std::vector<Element> elements = RandomElements(600, &random);
  for (Element& element : elements) {
    for (float& state : element.state) {
      state = std::bit_cast<float>(std::bit_cast<uint32_t>(state) & 0xFFFF0000);
    }
  }
  const Result exact = ApplyPlainly(float_key, factors, elements);
  const uint64_t flat_begin = (uint64_t{5} << 32) - 300;
  Result expected = exact;
  for (uint32_t k = 0; k < kStateArraysMax; ++k) {
    for (size_t i = 0; i < exact.state[k].size(); ++i) {
      const uint32_t bits =
          RandomBits(factors.random_seed, k / 2, flat_begin + i);
      uint32_t& state = expected.state[k][i];
      state = (state + (k % 2 == 0 ? bits >> 16 : bits & 0xFFFF)) >> 16;
    }
  }
  for (Target target : SupportedTargets()) {
    for (bool with_undo : {false, true}) {
      const Call call = {target, with_undo, /*cut=*/100, flat_begin};
      EXPECT_EQ(Apply(call, GetParam(), factors, elements), expected)
          << TargetName(target);
    }
  }
}

// A block's state is the float kernel's, encoded.
TEST_P(RulesTest, BlocksAreTheFloatKernelsEncoded) {
  if (GetParam().state != StateFormat::kDynamic8) return;
  std::mt19937 random(TestSeed());
  UpdateKernelKey float_key = GetParam();
  float_key.state = StateFormat::kFloat32;
  const UpdateFactors factors = FirstFactors(GetParam());
  std::vector<Element> elements = RandomElements(600, &random);
  const Result result = ApplyPlainly(GetParam(), factors, elements);
  // The float kernel begins with the values of the bytes.
  for (int k = 0; k < kStateArraysMax; ++k) {
    std::vector<float> values;
    values.reserve(elements.size());
    for (const Element& element : elements) values.push_back(element.state[k]);
    const bool is_signed = !IsNeverNegative(GetParam().optimizer, k);
    std::vector<uint8_t> codes(values.size());
    std::vector<float> scale(3);
    EncodeOn(PlainTarget(), is_signed, values.data(), codes.data(),
             scale.data(), values.size());
    DecodeOn(PlainTarget(), is_signed, codes.data(), scale.data(),
             values.data(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      elements[i].state[k] = values[i];
    }
  }
  Result expected = ApplyPlainly(float_key, factors, elements);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (expected.state[k].empty()) continue;
    std::vector<float> values(elements.size());
    std::memcpy(values.data(), expected.state[k].data(),
                values.size() * sizeof(float));
    const StateArray encoded(StateFormat::kDynamic8,
                             IsNeverNegative(GetParam().optimizer, k), values,
                             1);
    expected.state[k] = encoded.bits();
    expected.scale[k] = encoded.scale_bits();
  }
  EXPECT_EQ(result, expected);
}

// NaN has many bit patterns and each CPU makes its own; ours writes one.
TEST_P(RulesTest, NanIsCanonical) {
  const float nan = std::bit_cast<float>(0xFFF12345u);
  const Element element = {nan, nan, {nan, nan, nan}};
  for (Target target : SupportedTargets()) {
    const Result result =
        Apply({target}, GetParam(), FirstFactors(GetParam()), {element});
    EXPECT_EQ(result.master[0], 0x7FC00000u);
    const bool is_half = GetParam().state == StateFormat::kBFloat16;
    for (int k = 0; k < kStateArraysMax; ++k) {
      const bool is_block = GetParam().state == StateFormat::kDynamic8;
      for (uint32_t bits : is_block ? result.scale[k] : result.state[k]) {
        EXPECT_EQ(bits, is_half ? 0x7FC0u : 0x7FC00000u);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Keys, RulesTest, testing::ValuesIn(AllKeys()),
                         [](const auto& key) { return NameOfKey(key.param); });

// Values are rounded up as often as they should be: the mean over elements and
// over steps is the value.
TEST(StochasticRoundingTest, IsUnbiased) {
  constexpr size_t kNumel = 1 << 16;
  const UpdateKernel& kernel =
      *FindKernel({OptimizerKind::kSgd, sgd::kHasMomentum, DType::kFloat32,
                   DType::kFloat32, StateFormat::kBFloat16},
                  BestTarget());
  UpdateInput input;
  input.hyperparams[sgd::kMomentum] = 0.9;
  for (uint32_t fraction : {0x0001u, 0x1000u, 0x7FFFu, 0x8000u, 0xE123u}) {
    const float value = std::bit_cast<float>(0x3F800000u + fraction);
    const std::vector<float> gradient(kNumel, value);
    std::vector<float> master(kNumel);
    std::vector<float> parameter(kNumel);
    const void* const gradients[] = {gradient.data()};
    std::vector<int> ups_of_element(kNumel);
    constexpr int kSteps = 16;
    int64_t ups = 0;
    for (int step = 0; step < kSteps; ++step) {
      std::vector<uint16_t> buffer(kNumel);
      TileView view;
      view.gradients = gradients;
      view.parameter = parameter.data();
      view.master = master.data();
      view.state[0] = buffer.data();
      view.numel = kNumel;
      input.step = static_cast<uint64_t>(step);
      kernel.apply(kernel.prepare(input), view);
      for (size_t i = 0; i < kNumel; ++i) {
        ASSERT_LE(buffer[i] - 0x3F80, 1);
        ups_of_element[i] += buffer[i] - 0x3F80;
        ups += buffer[i] - 0x3F80;
      }
    }
    const double p = fraction / 65536.;
    const double n = 1. * kSteps * kNumel;
    EXPECT_NEAR(static_cast<double>(ups), n * p,
                5 * std::sqrt(n * p * (1 - p)) + 1);
    // Steps are independent: the elements' counts spread as binomial ones do.
    double variance = 0;
    for (int count : ups_of_element) {
      variance += (count - kSteps * p) * (count - kSteps * p) / kNumel;
    }
    EXPECT_NEAR(variance, kSteps * p * (1 - p),
                0.05 * kSteps * p * (1 - p) + 1e-3);
  }
}

TEST(FindKernelTest, HasNoneOfWhatDoesNotExist) {
  const Target target = PlainTarget();
  EXPECT_NE(FindKernel({}, target), nullptr);
  EXPECT_EQ(FindKernel({.optimizer = OptimizerKind::kMuon}, target), nullptr);
  EXPECT_EQ(FindKernel({.options = 2}, target), nullptr);
  EXPECT_EQ(FindKernel({.gradient = DType{0}}, target), nullptr);
  EXPECT_EQ(FindKernel({.parameter = DType{4}}, target), nullptr);
  EXPECT_EQ(FindKernel({.state = StateFormat{9}}, target), nullptr);
  for (DType dtype : {DType::kFloat32, DType::kFloat16}) {
    EXPECT_EQ(FindKernel({.parameter = dtype, .master = MasterFormat::kSplit},
                         target),
              nullptr);
  }
}

}  // namespace
}  // namespace optstate::kernels::cpu
