#ifndef OPTSTATE_CLIENT_COLLECTIVE_HALF_FLOATS_H_
#define OPTSTATE_CLIENT_COLLECTIVE_HALF_FLOATS_H_

#include <cmath>
#include <cstdint>

#include "absl/base/casts.h"

namespace optstate::client {

// Conversions of 16-bit floats, by their bits. To 16 bits they round to nearest
// even, and any NaN becomes the one quiet NaN that the kernels make.

inline float FloatFromBFloat16(uint16_t bits) {
  return absl::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t BFloat16FromFloat(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const auto bits = absl::bit_cast<uint32_t>(value);
  // Half a unit in the last place, less one when the result would be odd.
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float FloatFromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) {  // infinity or NaN
    return absl::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  }
  if (magnitude < 0x400) {  // subnormal: in units of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  // The exponents' biases differ by 112.
  return absl::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

inline uint16_t Float16FromFloat(float value) {
  if (std::isnan(value)) return 0x7E00;
  const auto bits = absl::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude >= 0x47800000) {  // 65536 and above
    return static_cast<uint16_t>(sign | 0x7C00);
  }
  if (magnitude < 0x38800000) {  // below 2^-14: subnormal
    // Floats in [0.5, 1) have the unit of a subnormal float16, 2^-24, so this
    // addition rounds to it.
    const float rounded = absl::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(
        sign | (absl::bit_cast<uint32_t>(rounded) - 0x3F000000));
  }
  const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - (112u << 23)) >> 13);
}

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_HALF_FLOATS_H_
