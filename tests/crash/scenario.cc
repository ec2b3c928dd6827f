#include "tests/crash/scenario.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace optstate::crash {
namespace {

constexpr int64_t kOddSizes[] = {0, 1, 17, 4095, 4096, 4097, 12289, 60001};

// SplitMix64.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Large ones add up to `elements`.
std::vector<int64_t> Sizes(uint64_t elements, std::mt19937_64& generator) {
  std::vector<int64_t> sizes(std::begin(kOddSizes), std::end(kOddSizes));
  const int64_t all = static_cast<int64_t>(elements);
  std::uniform_int_distribution<int64_t> large(all / 16, all / 3);
  for (int64_t left = all; left > 0;) {
    const int64_t size = std::min(large(generator), left);
    sizes.push_back(size);
    left -= size;
  }
  std::shuffle(sizes.begin(), sizes.end(), generator);
  return sizes;
}

}  // namespace

uint64_t Draw(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  return Mix(Mix(Mix(Mix(seed) ^ a) ^ b) ^ c);
}

double DrawUnit(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  return static_cast<double>(Draw(seed, a, b, c) >> 11) * 0x1p-53;
}

std::string Scenario::ToWord() const {
  return absl::StrJoin(
      {seed, elements, steps, uint64_t{world_size}, uint64_t{micro_steps},
       uint64_t{clip}, uint64_t{skip}, uint64_t{missing}, uint64_t{mixed}},
      ",");
}

absl::StatusOr<Scenario> Scenario::FromWord(const std::string& word) {
  std::vector<uint64_t> numbers;
  for (const absl::string_view each : absl::StrSplit(word, ',')) {
    uint64_t number = 0;
    if (!absl::SimpleAtoi(each, &number)) {
      return absl::InvalidArgumentError(word);
    }
    numbers.push_back(number);
  }
  if (numbers.size() != 9) return absl::InvalidArgumentError(word);
  return Scenario{.seed = numbers[0],
                  .elements = numbers[1],
                  .steps = numbers[2],
                  .world_size = static_cast<uint32_t>(numbers[3]),
                  .micro_steps = static_cast<uint32_t>(numbers[4]),
                  .clip = numbers[5] != 0,
                  .skip = numbers[6] != 0,
                  .missing = numbers[7] != 0,
                  .mixed = numbers[8] != 0};
}

std::string Scenario::Describe() const {
  std::vector<std::string> words = {
      absl::StrCat(world_size, world_size == 1 ? " rank" : " ranks")};
  if (micro_steps > 1) words.push_back("accumulation");
  if (clip) words.push_back("clipping");
  if (skip) words.push_back("skipped steps");
  if (missing) words.push_back("missing gradients");
  if (mixed) words.push_back("mixed dtypes and amsgrad");
  return absl::StrJoin(words, ", ");
}

LayoutSpec MakeLayout(const Scenario& scenario) {
  std::mt19937_64 generator(scenario.seed);
  const auto uniform = [&](uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(generator);
  };
  const auto dtype = [&] {
    return scenario.mixed ? static_cast<DType>(uniform(1, 3)) : DType::kFloat32;
  };
  LayoutSpec layout;
  layout.optimizer = static_cast<OptimizerKind>(uniform(1, 2));
  const uint64_t groups = scenario.mixed ? 3 : 1;
  for (uint64_t i = 0; i < groups; ++i) {
    layout.groups.push_back({.options = static_cast<uint32_t>(i % 2)});
  }
  const std::vector<int64_t> sizes = Sizes(scenario.elements, generator);
  for (size_t i = 0; i < sizes.size(); ++i) {
    layout.parameters.push_back(
        {.name = absl::StrCat("p", i),
         .shape = {sizes[i]},
         .numel = sizes[i],
         .dtype = dtype(),
         .gradient_dtype = dtype(),
         .group = static_cast<uint32_t>(i * groups / sizes.size())});
  }
  return layout;
}

}  // namespace optstate::crash
