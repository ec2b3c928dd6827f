#ifndef OPTSTATE_CLIENT_COLLECTIVE_TESTING_ELEMENTS_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TESTING_ELEMENTS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/types/span.h"
#include "client/collective/element_type.h"
#include "client/collective/half_floats.h"

namespace optstate::client {

// Arrays of any element type, as tests write and read them.

inline constexpr ElementType kElementTypes[] = {
    ElementType::kFloat32, ElementType::kBFloat16, ElementType::kFloat64,
    ElementType::kUint8};

inline void SetElement(ElementType type, absl::Span<std::byte> bytes, size_t i,
                       double value) {
  std::byte* const at = bytes.data() + i * SizeInBytes(type);
  const auto put = [&](auto element) {
    std::memcpy(at, &element, sizeof(element));
  };
  switch (type) {
    case ElementType::kFloat32:
      return put(static_cast<float>(value));
    case ElementType::kBFloat16:
      return put(BFloat16FromFloat(static_cast<float>(value)));
    case ElementType::kFloat64:
      return put(value);
    case ElementType::kUint8:
      return put(static_cast<uint8_t>(value));
  }
}

// Returns `count` elements, value(i) each.
template <typename Value>
std::vector<std::byte> Elements(ElementType type, size_t count,
                                const Value& value) {
  std::vector<std::byte> bytes(count * SizeInBytes(type));
  for (size_t i = 0; i < count; ++i) {
    SetElement(type, absl::MakeSpan(bytes), i, static_cast<double>(value(i)));
  }
  return bytes;
}

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TESTING_ELEMENTS_H_
