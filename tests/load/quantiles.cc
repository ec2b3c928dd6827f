#include "tests/load/quantiles.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace optstate::load {

std::string Quantiles::ToString() const {
  return absl::StrFormat("%d times, p50 %.3f ms, p99 %.3f ms, max %.3f ms",
                         count, p50_ms, p99_ms, max_ms);
}

Quantiles QuantilesOf(std::vector<double> times_ms) {
  if (times_ms.empty()) return {};
  std::sort(times_ms.begin(), times_ms.end());
  const auto at = [&times_ms](double part) {
    const double rank = std::ceil(part * static_cast<double>(times_ms.size()));
    return times_ms[static_cast<size_t>(std::max(rank, 1.0)) - 1];
  };
  return {.count = times_ms.size(),
          .p50_ms = at(0.5),
          .p99_ms = at(0.99),
          .max_ms = times_ms.back()};
}

double P99Ratio(const std::vector<double>& with,
                const std::vector<double>& without) {
  const double divisor = QuantilesOf(without).p99_ms;
  return divisor > 0 ? QuantilesOf(with).p99_ms / divisor : 0;
}

}  // namespace optstate::load
