#include "tests/crash/draw.h"

namespace optstate::crash {
namespace {

// Applies SplitMix64's mixing function.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t Draw(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  return Mix(Mix(Mix(Mix(seed) ^ a) ^ b) ^ c);
}

double DrawUnit(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  return static_cast<double>(Draw(seed, a, b, c) >> 11) * 0x1p-53;
}

}  // namespace optstate::crash
