#ifndef OPTSTATE_TESTS_LOAD_QUANTILES_H_
#define OPTSTATE_TESTS_LOAD_QUANTILES_H_

#include <cstddef>
#include <string>
#include <vector>

namespace optstate::load {

// The distribution of times, in ms; zeros of none. A quantile is the least time
// that so many percent of all do not exceed.
struct Quantiles {
  size_t count = 0;
  double p50_ms = 0;
  double p99_ms = 0;
  double max_ms = 0;

  std::string ToString() const;
};

Quantiles QuantilesOf(std::vector<double> times_ms);

// Returns p99 of `with` as a multiple of p99 of `without`; 0 when there is none
// to divide by.
double P99Ratio(const std::vector<double>& with,
                const std::vector<double>& without);

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_QUANTILES_H_
