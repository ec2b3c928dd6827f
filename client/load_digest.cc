#include "client/load_digest.h"

#include <isa-l.h>

#include <algorithm>

namespace optstate::client {
namespace {

// SplitMix64 (Steele, Lea and Flood 2014): a bijection that spreads every bit.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// CRC-32C; isa-l takes the length as an int.
uint32_t Crc32c(absl::Span<const std::byte> data) {
  constexpr size_t kPartBytes = size_t{1} << 30;
  uint32_t crc = ~uint32_t{0};
  for (size_t at = 0; at < data.size(); at += kPartBytes) {
    const size_t bytes = std::min(kPartBytes, data.size() - at);
    // The function only reads, but takes no const pointer.
    auto* const part = reinterpret_cast<unsigned char*>(
        const_cast<std::byte*>(data.data() + at));
    crc = crc32_iscsi(part, static_cast<int>(bytes), crc);
  }
  return ~crc;
}

}  // namespace

void LoadDigest::Add(StateArray array, uint32_t parameter, DType dtype,
                     absl::Span<const std::byte> data) {
  const uint64_t what = static_cast<uint64_t>(array) << 40 |
                        static_cast<uint64_t>(dtype) << 32 | parameter;
  // A sum, so that the order does not count.
  sum_ += Mix(Mix(what) ^ Crc32c(data));
}

}  // namespace optstate::client
