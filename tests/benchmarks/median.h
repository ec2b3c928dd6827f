#ifndef OPTSTATE_TESTS_BENCHMARKS_MEDIAN_H_
#define OPTSTATE_TESTS_BENCHMARKS_MEDIAN_H_

#include <algorithm>
#include <cstddef>
#include <vector>

namespace optstate {

// Returns the median, the upper one of two middle values; 0 of none.
inline double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle =
      values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace optstate

#endif  // OPTSTATE_TESTS_BENCHMARKS_MEDIAN_H_
