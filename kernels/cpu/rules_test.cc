// Every target against the one without SIMD, bit by bit. Whether that one is
// right is for update_kernel_test.cc.

#include "kernels/cpu/rules.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/dynamic.h"
#include "kernels/cpu/guarded_array.h"
#include "kernels/cpu/guarded_slot.h"
#include "kernels/cpu/targets.h"
#include "kernels/random_bits.h"
#include "kernels/split_master.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::cpu {
namespace {

Target PlainTarget() { return SupportedTargets().back(); }

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

// Every pair of dtypes, and with each of the other state formats two that
// differ.
std::vector<UpdateKernelKey> AllKeys() {
  std::vector<UpdateKernelKey> keys;
  for (const auto& [kind, options] : AllVariants()) {
    for (DType gradient : kAllDTypes) {
      for (DType parameter : kAllDTypes) {
        keys.push_back({kind, options, gradient, parameter});
      }
    }
    for (StateFormat state : {StateFormat::kBFloat16, StateFormat::kDynamic8}) {
      keys.push_back({kind, options, DType::kFloat32, DType::kFloat32, state});
      keys.push_back({kind, options, DType::kBFloat16, DType::kFloat16, state});
    }
    for (StateFormat state : {StateFormat::kFloat32, StateFormat::kBFloat16,
                              StateFormat::kDynamic8}) {
      keys.push_back({kind, options, DType::kBFloat16, DType::kBFloat16, state,
                      MasterFormat::kSplit});
    }
  }
  return keys;
}

absl::string_view NameOfFormat(StateFormat state) {
  return state == StateFormat::kFloat32    ? ""
         : state == StateFormat::kBFloat16 ? "_bfloat16_state"
                                           : "_dynamic8_state";
}

Variant VariantOf(const UpdateKernelKey& key) {
  return {key.optimizer, key.options};
}

bool IsSplit(const UpdateKernelKey& key) {
  return key.master == MasterFormat::kSplit;
}

std::string NameOfKey(const UpdateKernelKey& key) {
  return absl::StrCat(NameOf(VariantOf(key)), "_", Name(key.gradient), "_",
                      Name(key.parameter), NameOfFormat(key.state),
                      IsSplit(key) ? "_split" : "");
}

const OptimizerInfo& InfoOfKey(const UpdateKernelKey& key) {
  return InfoOf(key.optimizer);
}

// One element as the kernel reads it; each part as the bits of its dtype.
struct Element {
  float gradient = 0;
  float master = 0;
  float state[kStateArraysMax] = {};
};

// What a kernel wrote.
struct Result {
  std::vector<uint32_t> master;
  std::vector<uint32_t> state[kStateArraysMax];
  std::vector<uint32_t> scale[kStateArraysMax];
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

std::vector<uint16_t> HalvesOf(DType dtype, const std::vector<float>& floats) {
  std::vector<uint16_t> halves(floats.size());
  CastFromFloatOn(PlainTarget(), dtype, floats.data(), halves.data(),
                  halves.size());
  return halves;
}

// One state array in a key's format; the arrays of the others are empty.
class StateArray {
 public:
  StateArray(StateFormat format, bool is_never_negative,
             const std::vector<float>& values, size_t shift)
      : format_(format),
        floats_(format == StateFormat::kFloat32 ? values : std::vector<float>(),
                shift),
        halves_(format == StateFormat::kBFloat16
                    ? HalvesOf(DType::kBFloat16, values)
                    : std::vector<uint16_t>(),
                shift),
        codes_(std::vector<uint8_t>(
                   format == StateFormat::kDynamic8 ? values.size() : 0),
               shift),
        scale_(std::vector<float>(
                   format == StateFormat::kDynamic8
                       ? (values.size() + kQuantizedBlockElements - 1) /
                             kQuantizedBlockElements
                       : 0),
               shift) {
    if (format == StateFormat::kDynamic8) {
      EncodeOn(PlainTarget(), !is_never_negative, values.data(), codes_.data(),
               scale_.data(), values.size());
    }
  }

  // Of the elements from `begin` on.
  void* data(size_t begin) {
    if (format_ == StateFormat::kFloat32) return floats_.data() + begin;
    if (format_ == StateFormat::kBFloat16) return halves_.data() + begin;
    return codes_.data() + begin;
  }
  float* scale(size_t begin) {
    return scale_.data() + begin / kQuantizedBlockElements;
  }

  // The floats of an array that is not of bytes.
  std::vector<float> values() const {
    std::vector<float> values = floats_.elements();
    for (uint16_t half : halves_.elements()) {
      values.push_back(std::bit_cast<float>(uint32_t{half} << 16));
    }
    return values;
  }

  std::vector<uint32_t> bits() const {
    std::vector<uint32_t> bits = BitsOf(floats_);
    for (uint16_t half : halves_.elements()) bits.push_back(half);
    for (uint8_t code : codes_.elements()) bits.push_back(code);
    return bits;
  }
  std::vector<uint32_t> scale_bits() const { return BitsOf(scale_); }

  bool GuardsAreIntact() const {
    return floats_.GuardsAreIntact() && halves_.GuardsAreIntact() &&
           codes_.GuardsAreIntact() && scale_.GuardsAreIntact();
  }

 private:
  const StateFormat format_;
  GuardedArray<float> floats_;
  GuardedArray<uint16_t> halves_;
  GuardedArray<uint8_t> codes_;
  GuardedArray<float> scale_;
};

// How a kernel is called.
struct Call {
  Target target;
  bool with_undo = false;
  // The view is cut here, into two calls.
  size_t cut = 0;
  uint64_t flat_begin = 0;
};

// The masters that the halves are of, as bits.
std::vector<uint32_t> JoinedBits(const std::vector<uint16_t>& upper,
                                 const std::vector<uint16_t>& low) {
  std::vector<uint32_t> bits;
  for (size_t i = 0; i < upper.size(); ++i) {
    bits.push_back(Bits(JoinMaster(upper[i], low[i])));
  }
  return bits;
}

// Several gradients of dtype `Gradient`, each with as many elements.
template <typename Gradient>
using Gradients = std::vector<std::vector<Gradient>>;

template <typename Gradient, typename Parameter>
Result ApplyToArrays(const UpdateKernelKey& key, const UpdateFactors& factors,
                     const std::vector<Element>& elements,
                     const Gradients<Gradient>& gradients, const Call& call) {
  const UpdateKernel& kernel = *FindKernel(key, call.target);
  const size_t numel = elements.size();
  std::vector<float> masters;
  std::vector<float> state_values[kStateArraysMax];
  masters.reserve(numel);
  for (const Element& element : elements) {
    masters.push_back(element.master);
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!HasStateArray(InfoOfKey(key), k, key.options)) continue;
      state_values[k].push_back(element.state[k]);
    }
  }
  // Different shifts, so that no two arrays are aligned alike.
  std::vector<GuardedArray<Gradient>> gradient;
  gradient.reserve(gradients.size());
  for (const auto& elements_of_one : gradients) {
    gradient.emplace_back(elements_of_one, 1 + 2 * gradient.size());
  }
  GuardedArray<float> master(masters, 3);
  std::vector<uint16_t> upper_halves(numel), low_halves(numel);
  if (IsSplit(key)) {
    SplitMaster(masters.data(), upper_halves.data(), low_halves.data(), numel);
  }
  GuardedArray<uint16_t> low(low_halves, 3);
  std::vector<StateArray> state;
  state.reserve(kStateArraysMax);
  for (int k = 0; k < kStateArraysMax; ++k) {
    state.emplace_back(key.state, IsSquare(key.optimizer, k), state_values[k],
                       5 + 2 * static_cast<size_t>(k));
  }
  GuardedArray<Parameter> parameter(
      std::vector<Parameter>(upper_halves.begin(), upper_halves.end()), 11);

  const auto apply = [&](size_t begin, size_t end, UndoSlot* undo) {
    std::vector<const void*> pointers;
    pointers.reserve(gradient.size());
    for (auto& array : gradient) pointers.push_back(array.data() + begin);
    TileView view;
    view.gradients = pointers;
    view.parameter = parameter.data() + begin;
    view.master = IsSplit(key) ? static_cast<void*>(low.data() + begin)
                               : master.data() + begin;
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!HasStateArray(InfoOfKey(key), k, key.options)) continue;
      view.state[k] = state[k].data(begin);
      view.scale[k] = state[k].scale(begin);
    }
    view.numel = end - begin;
    view.flat_begin = call.flat_begin + begin;
    view.undo = undo;
    kernel.apply(factors, view);
  };
  const std::vector<float> old[] = {state[0].values(), state[1].values(),
                                    state[2].values()};
  if (call.with_undo) {
    GuardedSlot slot;
    apply(0, numel, slot.get());
    if (key.state == StateFormat::kDynamic8) {
      // undo_test looks closer.
      EXPECT_EQ(slot.get()->progress.load(), UndoProgress(numel));
    } else {
      // Of a split one NaN is the canonical one.
      if (IsSplit(key)) {
        for (float& x : masters) x = std::isnan(x) ? std::nanf("") : x;
      }
      EXPECT_TRUE(slot.HoldsTheEndOf({masters, old[0], old[1], old[2]}));
      EXPECT_TRUE(
          slot.HoldsXorOfTheEnd(masters, state[0].values(), state[1].values()));
    }
  } else {
    apply(0, call.cut, nullptr);
    apply(call.cut, numel, nullptr);
  }

  for (const auto& array : gradient) EXPECT_TRUE(array.GuardsAreIntact());
  EXPECT_TRUE(master.GuardsAreIntact() && parameter.GuardsAreIntact() &&
              low.GuardsAreIntact());
  Result result;
  result.master = BitsOf(master);
  for (int k = 0; k < kStateArraysMax; ++k) {
    EXPECT_TRUE(state[k].GuardsAreIntact());
    result.state[k] = state[k].bits();
    result.scale[k] = state[k].scale_bits();
  }
  result.parameter = BitsOf(parameter);
  if constexpr (sizeof(Parameter) == sizeof(uint16_t)) {
    if (IsSplit(key)) {
      result.master = JoinedBits(parameter.elements(), low.elements());
    }
  }
  return result;
}

// Each of `gradients` in place of the elements' own.
template <typename Gradient>
Result ApplyGradients(const UpdateKernelKey& key, const UpdateFactors& factors,
                      const std::vector<Element>& elements,
                      const Gradients<Gradient>& gradients, const Call& call) {
  return key.parameter == DType::kFloat32
             ? ApplyToArrays<Gradient, float>(key, factors, elements, gradients,
                                              call)
             : ApplyToArrays<Gradient, uint16_t>(key, factors, elements,
                                                 gradients, call);
}

// Each of `gradients` rounded to the key's dtype.
Result ApplySum(const UpdateKernelKey& key, const UpdateFactors& factors,
                const std::vector<Element>& elements,
                const Gradients<float>& gradients, const Call& call) {
  if (key.gradient == DType::kFloat32) {
    return ApplyGradients(key, factors, elements, gradients, call);
  }
  Gradients<uint16_t> halves;
  for (const auto& gradient : gradients) {
    halves.push_back(HalvesOf(key.gradient, gradient));
  }
  return ApplyGradients(key, factors, elements, halves, call);
}

Result Apply(const Call& call, const UpdateKernelKey& key,
             const UpdateFactors& factors,
             const std::vector<Element>& elements) {
  std::vector<float> gradient;
  gradient.reserve(elements.size());
  for (const Element& element : elements) gradient.push_back(element.gradient);
  return ApplySum(key, factors, elements, {gradient}, call);
}

Result ApplyPlainly(const UpdateKernelKey& key, const UpdateFactors& factors,
                    const std::vector<Element>& elements) {
  return Apply({PlainTarget()}, key, factors, elements);
}

UpdateFactors Factors(const UpdateKernelKey& key,
                      const Hyperparams& hyperparams, int64_t step_count = 7,
                      double gradient_limit = 0) {
  UpdateInput input;
  input.hyperparams = hyperparams;
  input.step_count = step_count;
  input.gradient_factor = 0.37;
  input.gradient_limit = gradient_limit;
  return FactorsAt(*FindKernel(key, PlainTarget()), key.optimizer, input);
}

UpdateFactors FirstFactors(const UpdateKernelKey& key) {
  return Factors(key, SettingsOf(VariantOf(key))[1].hyperparams);
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

// Several gradients are the kernel of float gradients' on their sum.
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

// What the factor and the limit make is what a gradient made so beforehand
// does.
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
    // It is its own master, and no other is written.
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

// Bit for bit, special values too, and so are the parameters that do not lie
// half way between two.
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
  // The float kernel begins with what the bytes stand for.
  for (int k = 0; k < kStateArraysMax; ++k) {
    std::vector<float> values;
    values.reserve(elements.size());
    for (const Element& element : elements) values.push_back(element.state[k]);
    const bool is_signed = !IsSquare(GetParam().optimizer, k);
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
                             IsSquare(GetParam().optimizer, k), values, 1);
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

// Rounded up as often as it should be: the mean over elements and over steps is
// the value.
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

TEST(SquaresTest, AreThoseOfTheirNames) {
  for (const auto& [kind, options] : AllVariants()) {
    for (size_t k = 0; k < InfoOf(kind).state_arrays.size(); ++k) {
      EXPECT_EQ(SquaresOf(kind) >> k & 1,
                IsSquare(kind, static_cast<int>(k)) ? 1u : 0u)
          << InfoOf(kind).name << " " << k;
    }
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
}  // namespace optstate::cpu
