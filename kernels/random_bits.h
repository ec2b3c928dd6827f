#ifndef OPTSTATE_KERNELS_RANDOM_BITS_H_
#define OPTSTATE_KERNELS_RANDOM_BITS_H_

#include <cstdint>

namespace optstate::kernels {

// Random bits that depend on nothing but a seed, a number of a stream and an
// index: they are the same in whatever process and order they are computed.
//
// Two rounds of a multiplicative hash of 32 bits (the constants are those of
// Chris Wellons' lowbias32), with a key before each.

inline constexpr uint32_t kRandomMultiplier1 = 0x7FEB352D;
inline constexpr uint32_t kRandomMultiplier2 = 0x846CA68B;

struct RandomKey {
  uint32_t first;
  uint32_t second;
};

// Applies SplitMix64's mixing function.
constexpr uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Returns the key of elements [high * 2^32, (high + 1) * 2^32).
constexpr RandomKey RandomKeyOf(uint32_t seed, uint32_t stream, uint64_t high) {
  const uint64_t key = Mix(Mix(uint64_t{seed} << 32 | stream) ^ high);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

constexpr uint32_t RandomBits(uint32_t seed, uint32_t stream, uint64_t index) {
  const RandomKey key = RandomKeyOf(seed, stream, index >> 32);
  uint32_t x = static_cast<uint32_t>(index) ^ key.first;
  x = (x ^ (x >> 16)) * kRandomMultiplier1;
  x = ((x ^ (x >> 15)) + key.second) * kRandomMultiplier2;
  return x ^ (x >> 16);
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_RANDOM_BITS_H_
