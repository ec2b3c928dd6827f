#ifndef OPTSTATE_TESTS_SIMULATION_SEEDED_DRAW_H_
#define OPTSTATE_TESTS_SIMULATION_SEEDED_DRAW_H_

#include <cstdint>
#include <random>

#include "absl/time/time.h"

namespace optstate::simulation {

// Random numbers that follow from a seed alone. The distributions are written
// here, because those of the standard library differ between its versions.
class SeededDraw {
 public:
  explicit SeededDraw(uint64_t seed) : engine_(seed) {}

  uint64_t Next() { return engine_(); }
  // Returns a number below `count`, which is not 0.
  uint64_t Below(uint64_t count) { return Next() % count; }
  // Returns a number in [0, 1).
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  bool Chance(double probability) { return Unit() < probability; }
  // Returns a duration in [least, most), in whole nanoseconds.
  absl::Duration Between(absl::Duration least, absl::Duration most) {
    const int64_t range = absl::ToInt64Nanoseconds(most - least);
    if (range <= 0) return least;
    return least + absl::Nanoseconds(static_cast<int64_t>(
                       Below(static_cast<uint64_t>(range))));
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_SEEDED_DRAW_H_
