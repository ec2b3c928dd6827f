#include "kernels/cpu/rule_calls.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
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
#include "kernels/cpu/rules.h"
#include "kernels/cpu/targets.h"
#include "kernels/split_master.h"
#include "kernels/test_keys.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cpu {
namespace {

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

absl::string_view NameOfFormat(StateFormat state) {
  return state == StateFormat::kFloat32    ? ""
         : state == StateFormat::kBFloat16 ? "_bfloat16_state"
                                           : "_dynamic8_state";
}

const OptimizerInfo& InfoOfKey(const UpdateKernelKey& key) {
  return InfoOf(key.optimizer);
}

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

// Returns the masters that the halves are of, as bits.
std::vector<uint32_t> JoinedBits(const std::vector<uint16_t>& upper,
                                 const std::vector<uint16_t>& low) {
  std::vector<uint32_t> bits;
  for (size_t i = 0; i < upper.size(); ++i) {
    bits.push_back(Bits(JoinMaster(upper[i], low[i])));
  }
  return bits;
}

}  // namespace

Target PlainTarget() { return SupportedTargets().back(); }

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

std::vector<uint16_t> HalvesOf(DType dtype, const std::vector<float>& floats) {
  std::vector<uint16_t> halves(floats.size());
  CastFromFloatOn(PlainTarget(), dtype, floats.data(), halves.data(),
                  halves.size());
  return halves;
}

StateArray::StateArray(StateFormat format, bool is_never_negative,
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

std::vector<float> StateArray::values() const {
  std::vector<float> values = floats_.elements();
  for (uint16_t half : halves_.elements()) {
    values.push_back(std::bit_cast<float>(uint32_t{half} << 16));
  }
  return values;
}

std::vector<uint32_t> StateArray::bits() const {
  std::vector<uint32_t> bits = BitsOf(floats_);
  for (uint16_t half : halves_.elements()) bits.push_back(half);
  for (uint8_t code : codes_.elements()) bits.push_back(code);
  return bits;
}

std::vector<uint32_t> StateArray::scale_bits() const { return BitsOf(scale_); }

namespace {

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
  // The shifts differ, so that no two arrays are aligned alike.
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
    state.emplace_back(key.state, IsNeverNegative(key.optimizer, k),
                       state_values[k], 5 + 2 * static_cast<size_t>(k));
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
    if (call.apply != nullptr) {
      EXPECT_TRUE(call.apply(key, factors, view));
    } else {
      kernel.apply(factors, view);
    }
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
      // For a split master, NaN is the canonical one.
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

// Applies each of `gradients` in place of the elements' own.
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

}  // namespace

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
                      const Hyperparams& hyperparams, int64_t step_count,
                      double gradient_limit) {
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

}  // namespace optstate::kernels::cpu
