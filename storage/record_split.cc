#include "storage/record_split.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace optstate::storage {

absl::Status CheckWeights(absl::Span<const uint32_t> weights,
                          size_t directories) {
  if (weights.empty()) return absl::OkStatus();
  if (weights.size() != directories) {
    return absl::InvalidArgumentError(
        absl::StrCat(weights.size(), " weights for ", directories,
                     " directories: each directory has one, or none has"));
  }
  uint32_t largest = 0;
  for (const uint32_t weight : weights) {
    largest = std::max(largest, weight);
    if (weight <= kDirectoryWeightMax) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a directory has the weight ", weight,
                     ", it must be at most ", kDirectoryWeightMax));
  }
  if (largest > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "all directories have the weight 0: one at least must have records");
}

std::vector<uint32_t> SmallestWeights(absl::Span<const uint32_t> weights) {
  uint32_t divisor = 0;
  for (const uint32_t weight : weights) divisor = std::gcd(divisor, weight);
  std::vector<uint32_t> smallest(weights.begin(), weights.end());
  for (uint32_t& weight : smallest) weight /= divisor;
  const bool are_equal = std::all_of(smallest.begin(), smallest.end(),
                                     [](uint32_t w) { return w == 1; });
  if (are_equal) smallest.clear();
  return smallest;
}

std::vector<uint32_t> WeightsByRate(absl::Span<const double> bytes_per_s) {
  constexpr double kAlike = 1.1;
  constexpr double kUnits = 10;  // of the slowest
  std::vector<size_t> order(bytes_per_s.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (const double rate : bytes_per_s) {
    if (!(rate > 0)) return {};
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return bytes_per_s[a] < bytes_per_s[b];
  });
  std::vector<uint32_t> weights(order.size());
  double slowest = 0;
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    double sum = 0;
    for (; end < order.size() &&
           bytes_per_s[order[end]] <= bytes_per_s[order[begin]] * kAlike;
         ++end) {
      sum += bytes_per_s[order[end]];
    }
    const double mean = sum / static_cast<double>(end - begin);
    if (begin == 0) slowest = mean;
    const double weight = std::min(std::round(kUnits * mean / slowest),
                                   static_cast<double>(kDirectoryWeightMax));
    for (size_t i = begin; i < end; ++i) {
      weights[order[i]] = static_cast<uint32_t>(weight);
    }
  }
  return SmallestWeights(weights);
}

// Each record goes to the directory that lags most behind its share: each turn
// adds its weight to a directory's credit, and the one with the most credit, of
// several the first, gets the record and pays the sum of all weights.
std::vector<uint32_t> SplitRecords(uint32_t records, size_t directories,
                                   absl::Span<const uint32_t> weights) {
  const auto weight_of = [&](size_t directory) {
    return weights.empty() ? int64_t{1} : int64_t{weights[directory]};
  };
  int64_t sum = 0;
  for (size_t i = 0; i < directories; ++i) sum += weight_of(i);
  std::vector<int64_t> credits(directories, 0);
  std::vector<uint32_t> split(records);
  for (uint32_t& directory : split) {
    for (size_t i = 0; i < directories; ++i) credits[i] += weight_of(i);
    const auto most = std::max_element(credits.begin(), credits.end());
    directory = static_cast<uint32_t>(most - credits.begin());
    *most -= sum;
  }
  return split;
}

std::string WeightsText(absl::Span<const uint32_t> weights) {
  return weights.empty() ? "equal parts" : absl::StrJoin(weights, ":");
}

}  // namespace optstate::storage
