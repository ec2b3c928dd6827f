#include "client/session/load_digest.h"

#include "client/session/content_digest.h"

namespace optstate::client {
namespace {

// SplitMix64 (Steele, Lea and Flood 2014): a bijection that spreads every bit.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

}  // namespace

void LoadDigest::Add(StateArray array, uint32_t parameter, DType dtype,
                     absl::Span<const std::byte> data) {
  const uint64_t what = static_cast<uint64_t>(array) << 40 |
                        static_cast<uint64_t>(dtype) << 32 | parameter;
  // A sum is independent of the order.
  sum_ += ContentDigest(data, Mix(what));
}

}  // namespace optstate::client
