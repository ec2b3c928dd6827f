#include "tests/crash/crash_layout.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace optstate::crash {
namespace {

constexpr int64_t kOddSizes[] = {0, 1, 17, 4095, 4096, 4097, 12289, 60001};

// The maker of one scenario's layout.
class LayoutMaker {
 public:
  explicit LayoutMaker(const Scenario& scenario)
      : scenario_(scenario), generator_(scenario.seed) {}

  LayoutSpec Make() {
    LayoutSpec layout;
    layout.optimizer = scenario_.optimizer;
    layout.state_format = scenario_.state_format;
    layout.master_format = scenario_.master_format;
    const size_t options = InfoOf(layout.optimizer).options.size();
    const uint64_t groups = Uniform(1, 3);
    for (uint64_t i = 0; i < groups; ++i) {
      layout.groups.push_back({.options = static_cast<uint32_t>(
                                   Uniform(0, (uint64_t{1} << options) - 1))});
    }
    const std::vector<int64_t> sizes = Sizes();
    for (size_t i = 0; i < sizes.size(); ++i) {
      layout.parameters.push_back(
          Parameter(i, sizes[i], i * groups / sizes.size()));
    }
    return layout;
  }

 private:
  uint64_t Uniform(uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(generator_);
  }

  // Draws sizes; large ones add up to about `elements`.
  std::vector<int64_t> Sizes() {
    std::vector<int64_t> sizes(std::begin(kOddSizes), std::end(kOddSizes));
    const uint64_t all = Elements();
    for (uint64_t left = all; left > 0;) {
      const uint64_t size = std::min(Uniform(all / 16, all / 3), left);
      sizes.push_back(static_cast<int64_t>(size));
      left -= size;
    }
    std::shuffle(sizes.begin(), sizes.end(), generator_);
    return sizes;
  }

  // Returns the number of elements: Muon multiplies matrices, and its step
  // takes many times as long per element.
  uint64_t Elements() const {
    return scenario_.optimizer == OptimizerKind::kMuon ? scenario_.elements / 4
                                                       : scenario_.elements;
  }

  // Returns a shape of few rows, for the same reason; other optimizers take
  // vectors too.
  std::vector<int64_t> Shape(int64_t size) {
    const bool matrix =
        scenario_.optimizer == OptimizerKind::kMuon || Uniform(0, 1) == 1;
    if (!matrix) return {size};
    const auto rows = static_cast<int64_t>(Uniform(1, 8));
    return {rows, (size + rows - 1) / rows};
  }

  DType One(DTypes dtypes) {
    if (dtypes != DTypes::kMixed) return static_cast<DType>(dtypes);
    return static_cast<DType>(Uniform(1, 3));
  }

  // A split master has no float16 parameter for its upper half.
  DType ParameterDType() {
    const DType dtype = One(scenario_.parameters);
    return scenario_.master_format == MasterFormat::kSplit &&
                   dtype == DType::kFloat16
               ? DType::kBFloat16
               : dtype;
  }

  ParameterSpec Parameter(size_t index, int64_t size, uint64_t group) {
    ParameterSpec parameter;
    parameter.name = absl::StrCat("p", index);
    parameter.shape = Shape(size);
    parameter.numel = 1;
    for (const int64_t dimension : parameter.shape) {
      parameter.numel *= dimension;
    }
    parameter.dtype = ParameterDType();
    parameter.gradient_dtype = One(scenario_.gradients);
    parameter.group = static_cast<uint32_t>(group);
    return parameter;
  }

  const Scenario& scenario_;
  std::mt19937_64 generator_;
};

}  // namespace

LayoutSpec MakeLayout(const Scenario& scenario) {
  return LayoutMaker(scenario).Make();
}

}  // namespace optstate::crash
