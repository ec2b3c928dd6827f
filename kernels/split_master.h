#ifndef OPTSTATE_KERNELS_SPLIT_MASTER_H_
#define OPTSTATE_KERNELS_SPLIT_MASTER_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace optstate::kernels {

// Conversions of MasterFormat::kSplit masters to and from float, one element
// each.

// Joins the halves. The parameter was rounded up where the low half is at least
// 0x8000: exactly where the low half is negative as a signed number, so that
// adding it to the upper half undoes the rounding.
constexpr float JoinMaster(uint16_t parameter, uint16_t low) {
  return std::bit_cast<float>(
      (uint32_t{parameter} << 16) +
      static_cast<uint32_t>(int32_t{static_cast<int16_t>(low)}));
}

// Splits a float; NaN becomes 0x7FC00000.
inline void SplitMaster(const float* in, uint16_t* parameter, uint16_t* low,
                        size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const float value =
        std::isnan(in[i]) ? std::numeric_limits<float>::quiet_NaN() : in[i];
    const auto bits = std::bit_cast<uint32_t>(value);
    parameter[i] = static_cast<uint16_t>((bits + 0x8000) >> 16);
    low[i] = static_cast<uint16_t>(bits);
  }
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_SPLIT_MASTER_H_
