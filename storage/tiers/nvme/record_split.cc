#include "storage/tiers/nvme/record_split.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace optstate::nvme {

absl::Status CheckWeights(absl::Span<const uint32_t> weights,
                          size_t directories) {
  if (weights.empty()) return absl::OkStatus();
  if (weights.size() != directories) {
    return absl::InvalidArgumentError(
        absl::StrCat(weights.size(), " weights for ", directories,
                     " directories: each directory has one, or none has"));
  }
  for (const uint32_t weight : weights) {
    if (weight >= 1 && weight <= kDirectoryWeightMax) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a directory has the weight ", weight,
                     ", it must be from 1 to ", kDirectoryWeightMax));
  }
  return absl::OkStatus();
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

}  // namespace optstate::nvme
