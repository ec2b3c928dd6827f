#ifndef OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_GRADIENT_ELEMENTS_H_
#define OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_GRADIENT_ELEMENTS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "client/collective/half_floats.h"
#include "proto/types/dtype.h"

namespace optstate::client {

// Access to element `index` of gradients in memory of any alignment.

inline float LoadGradient(DType dtype, const std::byte* data, uint64_t index) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, data + index * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + index * sizeof(bits), sizeof(bits));
  return dtype == DType::kBFloat16 ? FloatFromBFloat16(bits)
                                   : FloatFromFloat16(bits);
}

// Rounds to nearest even.
inline void StoreGradient(DType dtype, std::byte* data, uint64_t index,
                          float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(data + index * sizeof(value), &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == DType::kBFloat16 ? BFloat16FromFloat(value)
                                                  : Float16FromFloat(value);
  std::memcpy(data + index * sizeof(bits), &bits, sizeof(bits));
}

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_GRADIENT_ELEMENTS_H_
