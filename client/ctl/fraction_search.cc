#include "client/ctl/fraction_search.h"

#include <algorithm>
#include <cmath>

namespace optstate::ctl {
namespace {

constexpr double kReachMin = 0.02;

// Fractions have three decimals, so that the same one is not tried twice.
double Rounded(double fraction) {
  return std::clamp(std::round(fraction * 1000) / 1000, 0.0, 1.0);
}

}  // namespace

void FractionSearch::Note(double seconds) {
  if (is_over_) return;
  taken_.push_back(seconds);
  if (taken_.size() < kSettlingSteps + kMeasuredSteps) return;
  times_.emplace_back(
      fraction_,
      *std::min_element(taken_.begin() + kSettlingSteps, taken_.end()));
  taken_.clear();
  const std::optional<double> following = Following();
  is_over_ = !following.has_value();
  fraction_ = following.value_or(*best());
}

std::optional<double> FractionSearch::best() const {
  const auto fastest = std::min_element(times_.begin(), times_.end(),
                                        [](const auto& one, const auto& other) {
                                          return one.second < other.second;
                                        });
  if (fastest == times_.end()) return std::nullopt;
  return fastest->first;
}

std::optional<double> FractionSearch::SecondsOf(double fraction) const {
  for (const auto& [tried, seconds] : times_) {
    if (tried == fraction) return seconds;
  }
  return std::nullopt;
}

// Returns the fraction to try next; nothing: the best one is known.
std::optional<double> FractionSearch::Following() {
  const std::optional<double> devices = SecondsOf(0);
  if (!devices.has_value()) return 0;
  const double both = *SecondsOf(1) + *devices;
  if (times_.size() == 2 && both > 0) {
    const double balanced = Rounded(*devices / both);
    if (!SecondsOf(balanced).has_value()) return balanced;
  }
  while (reach_ >= kReachMin && times_.size() < kTriedMax) {
    for (const double step : {-reach_, reach_}) {
      const double beside = Rounded(*best() + step);
      if (!SecondsOf(beside).has_value()) return beside;
    }
    reach_ /= 2;
  }
  return std::nullopt;
}

}  // namespace optstate::ctl
