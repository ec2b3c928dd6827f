#ifndef OPTSTATE_TESTS_LOAD_SOAK_REPORT_H_
#define OPTSTATE_TESTS_LOAD_SOAK_REPORT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/load/admin_load.h"
#include "tests/load/cost_sample.h"

namespace optstate::load {

// A long slice of steps and calls, with a look at the costs again and again,
// between two slices of steps alone.
struct SoakOptions {
  // From one sample to the next; zero: no pause.
  absl::Duration sample_every = absl::ZeroDuration();
};

struct SoakReport {
  std::vector<CostSample> samples;      // in their order, during the soak
  std::vector<double> steps_before_ms;  // alone, before it
  std::vector<double> steps_ms;         // during it
  std::vector<double> steps_after_ms;   // alone, after it
  AdminTally calls;

  // The fewest samples that tell whether a cost grows.
  static constexpr size_t kSamplesMin = 9;

  // Returns what must not be: fds or memory that grow steadily, a p99 of steps
  // that is worse after than before by more than this ratio, answers that are
  // wrong, and too few samples to tell. Empty: nothing.
  //
  // The memory of this process is not looked at: it keeps the time of each
  // call.
  std::vector<std::string> Problems(double p99_ratio_max) const;
  std::string ToString() const;
};

// Returns whether a number grows steadily: of thirds of its samples, the median
// of each is above that of the one before by more than `allowance`. What is
// made at first use, or comes and goes, grows into one third at most.
bool GrowsSteadily(const std::vector<double>& samples, double allowance);

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_SOAK_REPORT_H_
