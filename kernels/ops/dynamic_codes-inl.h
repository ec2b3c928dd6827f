// State arrays of bytes, element by element: places in bitsandbytes' dynamic
// map (dynamic_map.h), times the largest of the block. Per-target include.

#if defined(OPTSTATE_KERNELS_OPS_DYNAMIC_CODES_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_OPS_DYNAMIC_CODES_INL_H_
#undef OPTSTATE_KERNELS_OPS_DYNAMIC_CODES_INL_H_
#else
#define OPTSTATE_KERNELS_OPS_DYNAMIC_CODES_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/dynamic_map.h"
#include "kernels/ops/ops-inl.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

#ifdef __CUDACC__
static __device__ const DynamicMap kDeviceSignedMap = MakeDynamicMap(true);
static __device__ const DynamicMap kDeviceUnsignedMap = MakeDynamicMap(false);
#endif

template <bool kSigned>
OPTSTATE_OP const DynamicMap& MapOf() {
#ifdef __CUDA_ARCH__
  return kSigned ? kDeviceSignedMap : kDeviceUnsignedMap;
#else
  return kSigned ? kSignedMap : kUnsignedMap;
#endif
}

template <bool kSigned>
using CodeOf = std::conditional_t<kSigned, int8_t, uint8_t>;

// Returns the magnitude of each number, given as a float; anything for 0.
template <class D, class V>
OPTSTATE_OP V MagnitudeOf(D d, V number, const DynamicMap& map) {
  const ops::RebindToSigned<D> di;
  const auto bits = ops::BitCast(di, number);
  const auto exponent = ops::ShiftRight<23>(bits);
  const auto mantissa =
      ops::Or(ops::And(bits, ops::Set(di, 0x7FFFFF)), ops::Set(di, 0x3F800000));
  const auto fraction = ops::Sub(ops::BitCast(d, mantissa), ops::Set(d, 1.0f));
  return ops::Add(ops::Lookup8(d, map.start, exponent),
                  ops::Product(ops::Lookup8(d, map.step, exponent), fraction));
}

// Decodes the codes of a block with this scale.
template <bool kSigned>
class BlockDecoder {
 public:
  OPTSTATE_HOST_DEVICE explicit BlockDecoder(float scale)
      : largest_(kSigned ? -scale : scale),
        zero_(std::isnan(scale) ? scale : 0.0f) {}

  template <class D>
  OPTSTATE_OP ops::Vec<D> Load(D d, const CodeOf<kSigned>* from) const {
    const DynamicMap& map = MapOf<kSigned>();
    const ops::RebindToSigned<D> di;
    const ops::Rebind<CodeOf<kSigned>, D> d8;
    const auto code = ops::PromoteTo(di, ops::LoadU(d8, from));
    const auto number =
        ops::ConvertTo(d, ops::Add(code, ops::Set(di, map.shift)));
    auto value = MagnitudeOf(d, number, map);
    if constexpr (kSigned) value = ops::CopySignToAbs(value, number);
    value = ops::Product(value, ops::Set(d, largest_));
    const auto is_zero = ops::RebindMask(d, ops::Eq(code, ops::Zero(di)));
    return ops::IfThenElse(is_zero, ops::Set(d, zero_), value);
  }

 private:
  const float largest_;
  // Code 0 is 0, even times infinity; but a scale that is NaN makes its whole
  // block NaN.
  const float zero_;
};

// Returns the scale of a block, given its largest value without the sign, as
// bits: the magnitudes of floats have the same order as integers, with NaN on
// top. NaN is canonical.
OPTSTATE_HOST_DEVICE inline float ScaleOf(int32_t largest_bits) {
  const auto largest = __builtin_bit_cast(float, largest_bits);
  return std::isnan(largest) ? std::numeric_limits<float>::quiet_NaN()
                             : largest;
}

// Returns the nearest place of each magnitude, not rounded yet; anything where
// the magnitude is less than map.begin.
template <class D, class V>
OPTSTATE_OP V NearestPlace(D d, V magnitude, const DynamicMap& map) {
  const ops::RebindToSigned<D> di;
  const auto bits = ops::BitCast(di, magnitude);
  const auto decade_or_below = ops::MulHigh16(
      di, ops::Add(ops::ShiftRight<16>(bits), ops::Set(di, map.decade_offset)),
      kDecadeFactor);
  const auto is_next =
      ops::Ge(magnitude, ops::Lookup8(d, map.next_begin, decade_or_below));
  // A true lane is -1.
  const auto decade = ops::Sub(
      decade_or_below, ops::VecFromMask(di, ops::RebindMask(di, is_next)));
  return ops::Min(
      ops::Add(ops::Product(ops::Lookup8(d, map.slope, decade), magnitude),
               ops::Lookup8(d, map.offset, decade)),
      ops::Lookup8(d, map.last, decade));
}

// Encodes the values of a block with this scale.
template <bool kSigned>
class BlockEncoder {
 public:
  OPTSTATE_HOST_DEVICE explicit BlockEncoder(float scale)
      : scale_(scale),
        has_reciprocal_(scale >= 0x1p-126f && scale <= 0x1p+126f),
        // Signed codes are minus the places.
        factor_((kSigned ? -1.0f : 1.0f) / (has_reciprocal_ ? scale : 1.0f)) {}

  // Says whether all codes are 0.
  OPTSTATE_HOST_DEVICE bool IsZero() const {
    return std::isnan(scale_) || scale_ == 0;
  }

  // Says whether each value is to be normalised before it is stored: the
  // scale's reciprocal is out of range.
  OPTSTATE_HOST_DEVICE bool NeedsNormalizing() const {
    return !has_reciprocal_;
  }
  OPTSTATE_HOST_DEVICE float Normalized(float value) const {
    if (std::isinf(scale_)) {
      return std::isinf(value) ? std::copysign(1.0f, value) : 0;
    }
    // A power of 2 makes normal floats of denormal ones, and the reverse.
    const float power = scale_ < 1 ? 0x1p+64f : 0x1p-64f;
    const float reciprocal = 1 / (scale_ * power);
    return value * power * reciprocal;
  }

  template <class D, class V>
  OPTSTATE_OP void Store(D d, V v, CodeOf<kSigned>* to) const {
    const DynamicMap& map = MapOf<kSigned>();
    const ops::RebindToSigned<D> di;
    const ops::Rebind<CodeOf<kSigned>, D> d8;
    const auto value = ops::Product(v, ops::Set(d, factor_));
    const auto magnitude = kSigned ? ops::Abs(value) : value;
    auto place = NearestPlace(d, magnitude, map);
    if constexpr (kSigned) place = ops::CopySignToAbs(place, value);
    // IEEE addition rounds to an integer, which is then in the low bits.
    constexpr float kRounder = 0x1.8p+23f;
    const auto code =
        ops::Sub(ops::BitCast(di, ops::Add(place, ops::Set(d, kRounder))),
                 ops::Set(di, __builtin_bit_cast(int32_t, kRounder)));
    // Unsigned, a negative value is stored as zero too.
    const auto is_zero =
        ops::RebindMask(di, ops::Lt(magnitude, ops::Set(d, map.begin)));
    // This saturates: -1, signed, is at the last place, for 1 has no opposite.
    ops::StoreLowBytes(d8, ops::IfThenZeroElse(is_zero, code), to);
  }

 private:
  const float scale_;
  const bool has_reciprocal_;
  const float factor_;
};

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
