#ifndef OPTSTATE_KERNELS_TEST_SEED_H_
#define OPTSTATE_KERNELS_TEST_SEED_H_

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace optstate::kernels {

// Returns a new seed for a randomised test, printed first; OPTSTATE_TEST_SEED
// in the environment repeats a run.
inline uint32_t TestSeed() {
  const char* given = std::getenv("OPTSTATE_TEST_SEED");
  const uint32_t seed =
      given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 0))
                       : std::random_device{}();
  std::cerr << "OPTSTATE_TEST_SEED=" << seed << std::endl;
  return seed;
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_TEST_SEED_H_
