#ifndef OPTSTATE_TESTS_SIMULATION_SIMULATED_CLOCK_H_
#define OPTSTATE_TESTS_SIMULATION_SIMULATED_CLOCK_H_

#include <functional>

#include "absl/time/time.h"

namespace optstate::simulation {

// The time of a simulation, which only the event queue moves.
//
// Threads: one at a time. Outlives the functions that it hands out.
class SimulatedClock {
 public:
  absl::Time Now() const { return now_; }
  // Moves on to `time`, which is not before Now().
  void AdvanceTo(absl::Time time) { now_ = time; }
  // Returns the clock as real code takes one.
  std::function<absl::Time()> AsFunction() const {
    return [this] { return now_; };
  }

 private:
  // Any moment will do. This one is far from 0, which real code takes for
  // "never".
  absl::Time now_ = absl::FromUnixSeconds(1'800'000'000);
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_SIMULATED_CLOCK_H_
