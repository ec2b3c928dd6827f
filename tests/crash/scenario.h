#ifndef OPTSTATE_TESTS_CRASH_SCENARIO_H_
#define OPTSTATE_TESTS_CRASH_SCENARIO_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "proto/types/layout.h"

namespace optstate::crash {

// What a round's ranks do. Everything else follows from it, so that a rank that
// takes another's place needs nothing more.
struct Scenario {
  uint64_t seed = 0;
  uint64_t elements = 1 << 20;  // about
  uint64_t steps = 1;
  uint32_t world_size = 1;
  uint32_t micro_steps = 1;  // more than 1: accumulation
  bool clip = false;         // max_norm in every step
  bool skip = false;         // found_inf or an infinite gradient in some steps
  bool missing = false;      // some parameters have no gradient in some steps
  bool mixed = false;        // all dtypes, groups with and without amsgrad

  // One word, for a command line.
  std::string ToWord() const;
  static absl::StatusOr<Scenario> FromWord(const std::string& word);
  // "2 ranks, accumulation, clipping"
  std::string Describe() const;
};

// A few large parameters and many small ones of awkward sizes.
LayoutSpec MakeLayout(const Scenario& scenario);

// A number that looks random, the same in every process.
uint64_t Draw(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0);
// The same in [0, 1).
double DrawUnit(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_SCENARIO_H_
