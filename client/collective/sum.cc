#include "client/collective/sum.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "client/collective/half_floats.h"

namespace optstate::client {
namespace {

// Elements whose sums are held at a time; they stay in the first cache.
constexpr size_t kBlock = 1024;

// Converts elements to what they are added in, and sums back.
template <typename Element>
struct Same {
  using Stored = Element;
  using Sum = Element;
  static Sum Load(Stored value) { return value; }
  static Stored Store(Sum sum) { return sum; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  static Sum Load(Stored value) { return FloatFromBFloat16(value); }
  static Stored Store(Sum sum) { return BFloat16FromFloat(sum); }
};

template <typename Format>
void SumAs(absl::Span<const std::byte* const> arrays, size_t count,
           std::byte* out) {
  using Stored = typename Format::Stored;
  using Sum = typename Format::Sum;
  std::array<Sum, kBlock> sums;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    const auto* first = reinterpret_cast<const Stored*>(arrays[0]) + begin;
    for (size_t i = 0; i < length; ++i) sums[i] = Format::Load(first[i]);
    for (const std::byte* array : arrays.subspan(1)) {
      const auto* next = reinterpret_cast<const Stored*>(array) + begin;
      for (size_t i = 0; i < length; ++i) {
        sums[i] = static_cast<Sum>(sums[i] + Format::Load(next[i]));
      }
    }
    auto* to = reinterpret_cast<Stored*>(out) + begin;
    for (size_t i = 0; i < length; ++i) to[i] = Format::Store(sums[i]);
  }
}

}  // namespace

void SumInOrder(ElementType type, absl::Span<const std::byte* const> arrays,
                size_t count, std::byte* out) {
  switch (type) {
    case ElementType::kFloat32:
      return SumAs<Same<float>>(arrays, count, out);
    case ElementType::kBFloat16:
      return SumAs<BFloat16>(arrays, count, out);
    case ElementType::kFloat64:
      return SumAs<Same<double>>(arrays, count, out);
    case ElementType::kUint8:
      return SumAs<Same<uint8_t>>(arrays, count, out);
  }
}

}  // namespace optstate::client
