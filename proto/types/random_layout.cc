#include "proto/types/random_layout.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "proto/types/dtype.h"

namespace optstate {
namespace {

uint64_t Seed() {
  const char* given = std::getenv("OPTSTATE_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 0)
                                         : std::random_device{}();
  std::cerr << "OPTSTATE_TEST_SEED=" << seed << std::endl;
  return seed;
}

}  // namespace

RandomLayouts::RandomLayouts() : generator_(Seed()) {}

uint64_t RandomLayouts::Uniform(uint64_t low, uint64_t high) {
  return std::uniform_int_distribution<uint64_t>(low, high)(generator_);
}

ParameterSpec RandomLayouts::NextParameter(uint32_t index, uint32_t group) {
  static const std::vector<std::vector<int64_t>> kOddShapes = {
      {},       {1},       {0},       {0, 7},    {15},      {16},
      {17},     {4095},    {4096},    {4097},    {8192},    {3, 5, 7},
      {64, 64}, {1, 1, 1}, {2, 0, 3}, {4096, 4}, {100, 200}};
  std::vector<int64_t> shape = {static_cast<int64_t>(Uniform(1, 20000))};
  if (Uniform(0, 1) == 0) {
    shape = kOddShapes[Uniform(0, kOddShapes.size() - 1)];
  }
  int64_t numel = 1;
  for (int64_t dimension : shape) numel *= dimension;
  return {.name = "layer." + std::to_string(index) + ".weight",
          .shape = std::move(shape),
          .numel = numel,
          .dtype = static_cast<DType>(Uniform(1, 3)),
          .gradient_dtype = static_cast<DType>(Uniform(1, 3)),
          .group = group};
}

LayoutSpec RandomLayouts::Next(uint32_t parameters_max) {
  LayoutSpec spec;
  spec.optimizer = static_cast<OptimizerKind>(Uniform(1, 8));
  const size_t options = InfoOf(spec.optimizer).options.size();
  for (uint64_t i = Uniform(1, 5); i > 0; --i) {
    spec.groups.push_back(
        {.options = static_cast<uint32_t>(Uniform(0, (1u << options) - 1))});
  }
  std::vector<uint32_t> groups(Uniform(1, parameters_max));
  for (uint32_t& group : groups) {
    group = static_cast<uint32_t>(Uniform(0, spec.groups.size() - 1));
  }
  std::sort(groups.begin(), groups.end());
  for (uint32_t i = 0; i < groups.size(); ++i) {
    spec.parameters.push_back(NextParameter(i, groups[i]));
  }
  return spec;
}

}  // namespace optstate
