#ifndef OPTSTATE_TESTS_LOAD_STRETCH_H_
#define OPTSTATE_TESTS_LOAD_STRETCH_H_

#include <cstdint>

#include "absl/time/time.h"

namespace optstate::load {

// How long a part of a run goes on: until so many things are done or the time
// is over, whichever comes first. A test counts, a benchmark measures time.
struct Stretch {
  uint64_t count = UINT64_MAX;
  absl::Duration time = absl::InfiniteDuration();
};

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_STRETCH_H_
