#ifndef OPTSTATE_TESTS_CRASH_DRAW_H_
#define OPTSTATE_TESTS_CRASH_DRAW_H_

#include <cstdint>

namespace optstate::crash {

// Returns a number that looks random, the same in every process.
uint64_t Draw(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0);
// Returns such a number in [0, 1).
double DrawUnit(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_DRAW_H_
