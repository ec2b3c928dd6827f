#ifndef OPTSTATE_CLIENT_COLLECTIVE_ELEMENT_TYPE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_ELEMENT_TYPE_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate::client {

// Element types that a collective adds up. The values are part of the frames
// that ranks send over TCP.
enum class ElementType : uint8_t {
  kFloat32 = 1,
  kBFloat16 = 2,
  kFloat64 = 3,
  kUint8 = 4,  // sums are modulo 256
};

// True for the values above; a byte from a peer is checked with this before it
// is cast.
constexpr bool IsValidElementType(uint32_t value) {
  return value >= 1 && value <= 4;
}

constexpr size_t SizeInBytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kBFloat16:
      return 2;
    case ElementType::kFloat64:
      return 8;
    case ElementType::kUint8:
      return 1;
  }
  return 1;
}

constexpr absl::string_view Name(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return "float32";
    case ElementType::kBFloat16:
      return "bfloat16";
    case ElementType::kFloat64:
      return "float64";
    case ElementType::kUint8:
      return "uint8";
  }
  return "invalid";
}

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_ELEMENT_TYPE_H_
