#ifndef OPTSTATE_PROTO_TYPES_RANDOM_LAYOUT_H_
#define OPTSTATE_PROTO_TYPES_RANDOM_LAYOUT_H_

#include <cstdint>
#include <random>

#include "proto/types/layout.h"

namespace optstate {

// Generates valid layouts for randomised tests, including easily forgotten
// cases: parameters of 0 and 1 elements, scalars, sizes around a tile, empty
// groups. The seed is printed first; OPTSTATE_TEST_SEED in the environment
// repeats a run.
class RandomLayouts {
 public:
  RandomLayouts();

  // Returns a layout of 1 to `parameters_max` parameters, each of at most about
  // 20,000 elements.
  LayoutSpec Next(uint32_t parameters_max);

  // Returns a uniform number in [low, high].
  uint64_t Uniform(uint64_t low, uint64_t high);

 private:
  ParameterSpec NextParameter(uint32_t index, uint32_t group);

  std::mt19937_64 generator_;
};

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_RANDOM_LAYOUT_H_
