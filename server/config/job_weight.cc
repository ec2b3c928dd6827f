#include "server/config/job_weight.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace optstate::config {

absl::StatusOr<JobWeight> ParseJobWeight(absl::string_view text) {
  const size_t sign = text.rfind('=');
  JobWeight parsed;
  if (sign == absl::string_view::npos || sign == 0 ||
      !absl::SimpleAtoi(text.substr(sign + 1), &parsed.weight) ||
      !IsWeight(parsed.weight)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", text, "\": must be PATTERN=WEIGHT, the weight from 1 to ",
        kWeightMax));
  }
  parsed.pattern = std::string(text.substr(0, sign));
  return parsed;
}

uint32_t WeightOf(const v1::EngineSettings& settings, const std::string& job) {
  for (const std::string& text : settings.job_weights()) {
    const absl::StatusOr<JobWeight> one = ParseJobWeight(text);
    if (!one.ok()) continue;
    if (::fnmatch(one->pattern.c_str(), job.c_str(), 0) == 0) {
      return one->weight;
    }
  }
  return settings.weight();
}

uint32_t LargestWeight(const v1::EngineSettings& settings) {
  uint32_t largest = settings.weight();
  for (const std::string& text : settings.job_weights()) {
    const absl::StatusOr<JobWeight> one = ParseJobWeight(text);
    if (one.ok()) largest = std::max(largest, one->weight);
  }
  return largest;
}

int NiceSteps(double weight) {
  return -static_cast<int>(
      std::lround(std::log(weight / 100.0) / std::log(1.25)));
}

}  // namespace optstate::config
