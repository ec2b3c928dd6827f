// The results of kernels, as hashes that are kept in golden_bits.h: equal on
// every machine that runs this test, where the tests beside it compare the
// instruction sets of one machine with each other.

#include "kernels/golden_bits.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/rules.h"
#include "kernels/cpu/targets.h"
#include "kernels/cpu/whole_rules.h"
#include "kernels/random_bits.h"
#include "kernels/reduction.h"
#include "kernels/split_master.h"
#include "kernels/test_keys.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

using cpu::SupportedTargets;
using cpu::Target;

constexpr size_t kNumel = 600;  // no multiple of a vector or a block
constexpr int kSteps = 4;
constexpr int64_t kLateStep = 1000;  // as the last one

// The FNV-1a hash.
class Hash {
 public:
  void Take(const void* data, size_t bytes) {
    const auto* const byte = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < bytes; ++i) {
      value_ = (value_ ^ byte[i]) * 0x100000001B3;
    }
  }
  template <typename T>
  void Take(const std::vector<T>& values) {
    Take(values.data(), values.size() * sizeof(T));
  }

  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325;
};

// Returns values of 24 magnitudes, and in the first block, here and there,
// special ones. <random> is not used: its distributions are the library's.
std::vector<float> Values(uint32_t seed, size_t numel) {
  constexpr float kSpecial[] = {0.0f,
                                -0.0f,
                                std::numeric_limits<float>::denorm_min(),
                                -1e-39f,
                                65519.0f,
                                std::numeric_limits<float>::max(),
                                -std::numeric_limits<float>::infinity()};
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) {
    const uint32_t bits = RandomBits(seed, 0, i);
    const uint32_t exponent = 127 - 20 + (bits >> 23 & 0xFF) % 24;
    values[i] = std::bit_cast<float>((bits & 0x807FFFFF) | exponent << 23);
    if (i % 29 != 7 || i >= kQuantizedBlockElements) continue;
    const size_t special = bits % (std::size(kSpecial) + 1);
    values[i] = special < std::size(kSpecial)
                    ? kSpecial[special]
                    // This is a NaN other than the one that kernels write.
                    : std::bit_cast<float>(0xFFA00000 | (bits & 0xFFFF));
  }
  return values;
}

std::vector<uint32_t> Encoded(Target target, DType dtype,
                              const std::vector<float>& values) {
  std::vector<uint32_t> elements(values.size());  // enough for every dtype
  cpu::CastFromFloatOn(target, dtype, values.data(), elements.data(),
                       values.size());
  return elements;
}

// Updates a parameter from zeroed state on, for some steps.
void TakeUpdates(Target target, const UpdateKernelKey& key,
                 const Hyperparams& hyperparams, Hash* hash) {
  const UpdateKernel& kernel = *cpu::FindKernel(key, target);
  const bool is_split = key.master == MasterFormat::kSplit;
  std::vector<float> master = Values(1, kNumel);
  std::vector<uint32_t> parameter(kNumel);
  if (is_split) {
    std::vector<uint16_t> low(2 * kNumel);
    SplitMaster(master.data(), reinterpret_cast<uint16_t*>(parameter.data()),
                low.data(), kNumel);
    std::copy_n(reinterpret_cast<const float*>(low.data()), kNumel,
                master.data());
  }
  std::vector<float> state[kStateArraysMax];
  std::vector<float> scale[kStateArraysMax];
  TileView view;
  view.parameter = parameter.data();
  view.master = master.data();
  view.numel = kNumel;
  view.flat_begin = 0xFFFFFF00;  // crosses 2^32, where random bits change keys
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!HasStateArray(InfoOf(key.optimizer), k, key.options)) continue;
    state[k].resize(kNumel);
    scale[k].resize(kNumel / kQuantizedBlockElements + 1);
    view.state[k] = state[k].data();
    view.scale[k] = scale[k].data();
  }
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<uint32_t> gradient = Encoded(
        target, key.gradient, Values(1 + static_cast<uint32_t>(step), kNumel));
    // The last step is a late one, sums two gradients and cuts the sum.
    const std::vector<const void*> gradients(step == kSteps ? 2 : 1,
                                             gradient.data());
    UpdateInput input;
    input.hyperparams = hyperparams;
    input.step_count = step < kSteps ? step : kLateStep;
    input.step = static_cast<uint64_t>(step);
    input.gradient_factor = 0.3;
    input.gradient_limit = step == kSteps ? 0.7 : 0;
    view.gradients = gradients;
    kernel.apply(FactorsAt(kernel, key.optimizer, input), view);
  }
  hash->Take(parameter);
  hash->Take(master);
  for (int k = 0; k < kStateArraysMax; ++k) {
    hash->Take(state[k]);
    hash->Take(scale[k]);
  }
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

void TakeNonSeparableUpdates(Target target, OptimizerKind kind,
                             const std::vector<int64_t>& shape, Hash* hash) {
  const WholeKernel& kernel = *cpu::FindWholeKernel(kind, target);
  size_t numel = 1;
  for (int64_t size : shape) numel *= static_cast<size_t>(size);
  // Special values are left out: one NaN makes NaN of all.
  const auto values = [numel](uint32_t seed) {
    std::vector<float> all = Values(seed, numel);
    for (size_t i = 7; i < numel; i += 29) all[i] = 0.25f;
    return all;
  };
  std::vector<float> master = values(1);
  std::vector<float> new_master(numel);
  std::vector<float> state[kStateArraysMax];
  WholeView view;
  view.shape = shape;
  view.numel = numel;
  view.new_master = new_master.data();
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (static_cast<size_t>(k) < InfoOf(kind).state_arrays.size()) {
      state[k].resize(StateElements(InfoOf(kind), k, shape));
    }
    view.state[k] = view.new_state[k] = state[k].data();
  }
  const size_t bytes = kernel.workspace_elements(shape) * sizeof(float);
  const std::unique_ptr<float, FreeDeleter> workspace(
      static_cast<float*>(std::aligned_alloc(64, (bytes / 64 + 1) * 64)));
  view.workspace = workspace.get();
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<float> gradient = values(1 + static_cast<uint32_t>(step));
    UpdateInput input;
    input.hyperparams = DefaultHyperparams(kind);
    input.step_count = step < kSteps ? step : kLateStep;
    view.gradient = gradient.data();
    view.master = master.data();
    kernel.compute(input, view);
    master = new_master;
  }
  hash->Take(master);
  for (const auto& array : state) hash->Take(array);
}

uint64_t ReductionHash(Target target, DType dtype) {
  Hash hash;
  for (const bool has_specials : {false, true}) {
    std::vector<float> values = Values(1, kNumel);
    for (size_t i = 7; !has_specials && i < kNumel; i += 29) values[i] = 1;
    const std::vector<uint32_t> gradient = Encoded(target, dtype, values);
    for (const size_t count : {1, 3}) {
      const std::vector<const void*> gradients(count, gradient.data());
      for (const Reduction reduction :
           {Reduction::kSumOfSquares, Reduction::kSumOfAbsolutes,
            Reduction::kLargestAbsolute}) {
        const double result =
            cpu::ReduceOn(target, reduction, dtype, gradients, kNumel);
        hash.Take(&result, sizeof(result));
      }
    }
  }
  return hash.value();
}

// A column of the table: the other formats that a kernel is made for.
struct Formats {
  DType parameter;
  StateFormat state = StateFormat::kFloat32;
  MasterFormat master = MasterFormat::kFloat32;
};
constexpr Formats kColumns[] = {
    {DType::kFloat32},
    {DType::kBFloat16},
    {DType::kFloat16},
    {DType::kBFloat16, StateFormat::kFloat32, MasterFormat::kSplit},
    {DType::kBFloat16, StateFormat::kBFloat16},
    {DType::kBFloat16, StateFormat::kDynamic8}};
static_assert(std::size(kColumns) == kGoldenColumns);

GoldenRow RowOf(Target target, const Variant& variant) {
  GoldenRow row = {};
  for (size_t column = 0; column < kGoldenColumns; ++column) {
    const auto [parameter, state, master] = kColumns[column];
    Hash hash;
    for (const DType gradient : kAllDTypes) {
      for (const Setting& setting : SettingsOf(variant)) {
        TakeUpdates(
            target,
            {variant.kind, variant.options, gradient, parameter, state, master},
            setting.hyperparams, &hash);
      }
    }
    row.hash[column] = hash.value();
  }
  return row;
}

GoldenRow WholeRowOf(Target target, OptimizerKind kind) {
  GoldenRow row = {};
  const std::vector<std::vector<int64_t>> shapes = {{20, 30}, {33, 9}};
  for (size_t column = 0; column < shapes.size(); ++column) {
    Hash hash;
    TakeNonSeparableUpdates(target, kind, shapes[column], &hash);
    row.hash[column] = hash.value();
  }
  return row;
}

GoldenRow ReductionRowOf(Target target) {
  GoldenRow row = {};
  for (size_t k = 0; k < std::size(kAllDTypes); ++k) {
    row.hash[k] = ReductionHash(target, kAllDTypes[k]);
  }
  return row;
}

void ExpectGolden(absl::string_view name, const GoldenRow& row) {
  const auto* const golden =
      std::find_if(std::begin(kGolden), std::end(kGolden),
                   [name](const GoldenRow& g) { return g.name == name; });
  if (golden != std::end(kGolden) &&
      std::equal(std::begin(row.hash), std::end(row.hash), golden->hash)) {
    return;
  }
  std::string line = absl::StrFormat("{\"%s\", {", name);
  for (size_t k = 0; k < kGoldenColumns; ++k) {
    absl::StrAppendFormat(&line, "%s0x%016x", k == 0 ? "" : ", ", row.hash[k]);
  }
  ADD_FAILURE() << "golden_bits.h has another row, or none; here it is\n"
                << line << "}},";
}

class GoldenBitsTest : public testing::TestWithParam<Target> {};

TEST_P(GoldenBitsTest, UpdatesAreThoseOfEveryMachine) {
  for (const Variant& variant : AllVariants()) {
    ExpectGolden(NameOf(variant), RowOf(GetParam(), variant));
  }
}

TEST_P(GoldenBitsTest, NonSeparableUpdatesAreThoseOfEveryMachine) {
  for (const OptimizerKind kind :
       {OptimizerKind::kLamb, OptimizerKind::kAdafactor,
        OptimizerKind::kMuon}) {
    ExpectGolden(InfoOf(kind).name, WholeRowOf(GetParam(), kind));
  }
}

TEST_P(GoldenBitsTest, ReductionsAreThoseOfEveryMachine) {
  ExpectGolden("Reduce", ReductionRowOf(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Targets, GoldenBitsTest,
                         testing::ValuesIn(SupportedTargets().begin(),
                                           SupportedTargets().end()),
                         [](const testing::TestParamInfo<Target>& target) {
                           return std::string(cpu::TargetName(target.param));
                         });

}  // namespace
}  // namespace optstate::kernels
