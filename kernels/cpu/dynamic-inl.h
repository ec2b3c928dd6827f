// State arrays of bytes: places in bitsandbytes' dynamic map (dynamic_map.h),
// times the largest of the block. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_DYNAMIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_DYNAMIC_INL_H_
#undef OPTSTATE_KERNELS_CPU_DYNAMIC_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_DYNAMIC_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/product-inl.h"
#include "kernels/dynamic_map.h"
#include "kernels/update_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Returns table[index[i] % 8].
template <class D, class VI>
HWY_INLINE hn::Vec<D> Lookup(D d, const float* table, VI index) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  return hn::TableLookupLanes(hn::LoadU(d, table),
                              hn::IndicesFromVec(d, index));
#else
  const hn::RebindToSigned<D> di;
  return hn::GatherIndex(d, table, hn::And(index, hn::Set(di, 7)));
#endif
}

// Returns the magnitude of each number, given as a float; anything for 0.
template <class D, class V>
HWY_INLINE V MagnitudeOf(D d, V number, const DynamicMap& map) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, number);
  const auto exponent = hn::ShiftRight<23>(bits);
  const auto mantissa =
      hn::Or(hn::And(bits, hn::Set(di, 0x7FFFFF)), hn::Set(di, 0x3F800000));
  const auto fraction = hn::Sub(hn::BitCast(d, mantissa), hn::Set(d, 1.0f));
  return hn::Add(Lookup(d, map.start, exponent),
                 Product(Lookup(d, map.step, exponent), fraction));
}

// Decodes the codes of one block. Reads and writes whole vectors: 256 codes and
// floats.
template <bool kSigned>
HWY_NOINLINE void DecodeBlock(const uint8_t* codes, float scale,
                              float* values) {
  constexpr const DynamicMap& kMap = kSigned ? kSignedMap : kUnsignedMap;
  using Code = std::conditional_t<kSigned, int8_t, uint8_t>;
  const auto* from = reinterpret_cast<const Code*>(codes);
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<Code, decltype(d)> d8;
  const auto largest = hn::Set(d, kSigned ? -scale : scale);
  // Code 0 is 0, even times infinity; but a scale that is NaN makes its whole
  // block NaN.
  const auto zero = hn::Set(d, std::isnan(scale) ? scale : 0.0f);
  for (size_t i = 0; i < kQuantizedBlockElements; i += hn::Lanes(d)) {
    const auto code = hn::PromoteTo(di, hn::LoadU(d8, from + i));
    const auto number =
        hn::ConvertTo(d, hn::Add(code, hn::Set(di, kMap.shift)));
    auto value = MagnitudeOf(d, number, kMap);
    if constexpr (kSigned) value = hn::CopySignToAbs(value, number);
    value = Product(value, largest);
    const auto is_zero = hn::RebindMask(d, hn::Eq(code, hn::Zero(di)));
    hn::StoreU(hn::IfThenElse(is_zero, zero, value), d, values + i);
  }
}

// Returns the largest absolute value; NaN wins, and is canonical.
inline float LargestOf(const float* values) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  // The magnitudes of floats have the same order as integers, with NaN on top.
  auto largest = hn::Zero(di);
  for (size_t i = 0; i < kQuantizedBlockElements; i += hn::Lanes(d)) {
    const auto value = hn::Abs(hn::LoadU(d, values + i));
    largest = hn::Max(largest, hn::BitCast(di, value));
  }
  HWY_ALIGN int32_t lanes[hn::MaxLanes(di)];
  hn::Store(largest, di, lanes);
  int32_t bits = 0;
  for (size_t k = 0; k < hn::Lanes(di); ++k) bits = std::max(bits, lanes[k]);
  const auto result = std::bit_cast<float>(bits);
  return std::isnan(result) ? std::numeric_limits<float>::quiet_NaN() : result;
}

// Returns x * kDecadeFactor / 2^16, of 16 bits.
template <class DI, class VI>
HWY_INLINE VI TimesDecadeFactor(DI di, VI x) {
#if HWY_TARGET == HWY_SCALAR
  return hn::ShiftRight<16>(hn::Mul(x, hn::Set(di, kDecadeFactor)));
#else
  const hn::Repartition<uint16_t, DI> d16;
  return hn::BitCast(
      di, hn::MulHigh(hn::BitCast(d16, x), hn::Set(d16, kDecadeFactor)));
#endif
}

// Returns the nearest place of each magnitude, not rounded yet; anything where
// the magnitude is less than map.begin.
template <class D, class V>
HWY_INLINE V NearestPlace(D d, V magnitude, const DynamicMap& map) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, magnitude);
  const auto decade_or_below = TimesDecadeFactor(
      di, hn::Add(hn::ShiftRight<16>(bits), hn::Set(di, map.decade_offset)));
  const auto is_next =
      hn::Ge(magnitude, Lookup(d, map.next_begin, decade_or_below));
  // A true lane is -1.
  const auto decade = hn::Sub(decade_or_below,
                              hn::VecFromMask(di, hn::RebindMask(di, is_next)));
  return hn::Min(hn::Add(Product(Lookup(d, map.slope, decade), magnitude),
                         Lookup(d, map.offset, decade)),
                 Lookup(d, map.last, decade));
}

// Scales values whose scale has a reciprocal that is out of range: afterwards
// the reciprocal of 1 will do.
inline void Normalize(float scale, float* values) {
  const bool is_infinite = std::isinf(scale);
  // A power of 2 makes normal floats of denormal ones, and the reverse.
  const float power = scale < 1 ? 0x1p+64f : 0x1p-64f;
  const float reciprocal = 1 / (scale * power);
  for (size_t i = 0; i < kQuantizedBlockElements; ++i) {
    float& value = values[i];
    if (is_infinite) {
      value = std::isinf(value) ? std::copysign(1.0f, value) : 0;
    } else {
      value = value * power * reciprocal;
    }
  }
}

// Writes the nearest codes of one block's values; returns their scale. Reads
// and writes whole vectors, 256 floats and codes, and may change the values.
template <bool kSigned>
HWY_NOINLINE float EncodeBlock(float* values, uint8_t* codes) {
  constexpr const DynamicMap& kMap = kSigned ? kSignedMap : kUnsignedMap;
  using Code = std::conditional_t<kSigned, int8_t, uint8_t>;
  auto* to = reinterpret_cast<Code*>(codes);
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<Code, decltype(d)> d8;
  const float scale = LargestOf(values);
  if (std::isnan(scale) || scale == 0) {
    std::memset(codes, 0, kQuantizedBlockElements);
    return scale;
  }
  const bool has_reciprocal = scale >= 0x1p-126f && scale <= 0x1p+126f;
  if (!has_reciprocal) Normalize(scale, values);
  const float reciprocal = has_reciprocal ? 1 / scale : 1.0f;
  // Signed codes are minus the places.
  const auto factor = hn::Set(d, kSigned ? -reciprocal : reciprocal);
  for (size_t i = 0; i < kQuantizedBlockElements; i += hn::Lanes(d)) {
    const auto value = Product(hn::LoadU(d, values + i), factor);
    const auto magnitude = kSigned ? hn::Abs(value) : value;
    auto place = NearestPlace(d, magnitude, kMap);
    if constexpr (kSigned) place = hn::CopySignToAbs(place, value);
    // IEEE addition rounds to an integer, which is then in the low bits.
    constexpr float kRounder = 0x1.8p+23f;
    const auto code =
        hn::Sub(hn::BitCast(di, hn::Add(place, hn::Set(d, kRounder))),
                hn::Set(di, std::bit_cast<int32_t>(kRounder)));
    // Unsigned, a negative value is stored as zero too.
    const auto is_zero =
        hn::RebindMask(di, hn::Lt(magnitude, hn::Set(d, kMap.begin)));
    // This saturates: -1, signed, is at the last place, for 1 has no opposite.
    hn::StoreU(hn::DemoteTo(d8, hn::IfThenZeroElse(is_zero, code)), d8, to + i);
  }
  return scale;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
