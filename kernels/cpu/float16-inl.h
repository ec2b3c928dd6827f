// Conversions of elements of every dtype to and from vectors of float.
// Per-target include.
//
// The conversions are written in integers (plus two float additions that are
// exact or rounded by IEEE's default rule), because the instructions for them
// differ between targets in rounding, denormals and NaN, and these do not.

#if defined(OPTSTATE_KERNELS_CPU_FLOAT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_FLOAT16_INL_H_
#undef OPTSTATE_KERNELS_CPU_FLOAT16_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_FLOAT16_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The type of an element in memory: float, or the 16 bits.
template <DType kDType>
using StorageOf =
    std::conditional_t<kDType == DType::kFloat32, float, uint16_t>;

// The one NaN that kernels write: x86, Arm and CUDA each make a different one,
// and results are compared bit by bit. (Ask with IsNaN: Highway 1.0.3 says of a
// NaN on AVX2 that it is not unequal to itself.)
inline constexpr uint32_t kCanonicalNanBits = 0x7FC00000;

template <bool kPlain = false, class D, class V>
HWY_INLINE V CanonicalNan(D d, V v) {
  if constexpr (kPlain) return v;
  const hn::RebindToUnsigned<D> du;
  const V nan = hn::BitCast(d, hn::Set(du, kCanonicalNanBits));
  return hn::IfThenElse(hn::IsNaN(v), nan, v);
}

// `bits` holds a bfloat16 in the low half of each lane.
template <class D, class VI>
HWY_INLINE hn::Vec<D> FloatFromBFloat16(D d, VI bits) {
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

// Returns bfloat16 in the upper half of each lane; the lower half is left over.
// No lane is NaN.
template <class D, class V>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RoundedToUpperHalf(D, V v) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v);
  // Adds half a unit in the last place, less one when the result would be odd:
  // the carry rounds to nearest even, and into infinity where it must.
  const auto is_odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  return hn::Add(bits, hn::Add(is_odd, hn::Set(du, 0x7FFF)));
}

// Rounds to bfloat16. kPlain: no lane is NaN.
template <bool kPlain = false, class D, class V>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> BFloat16FromFloat(D d, V v) {
  const hn::RebindToSigned<D> di;
  const auto rounded = hn::ShiftRight<16>(RoundedToUpperHalf(d, v));
  if constexpr (kPlain) return hn::BitCast(di, rounded);
  const auto is_nan = hn::RebindMask(di, hn::IsNaN(v));
  return hn::IfThenElse(is_nan, hn::Set(di, 0x7FC0), hn::BitCast(di, rounded));
}

// `bits` holds a float16 in the low half of each lane.
template <class D, class VI>
HWY_INLINE hn::Vec<D> FloatFromFloat16(D d, VI bits) {
  const hn::RebindToSigned<D> di;
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(di, 0x8000)));
  const auto shifted = hn::ShiftLeft<13>(hn::And(bits, hn::Set(di, 0x7FFF)));
  const auto rebias = hn::Set(di, (127 - 15) << 23);
  const auto normal = hn::Add(shifted, rebias);
  // Infinity and NaN have an exponent that goes all the way to 255.
  const auto special = hn::Add(normal, rebias);
  const auto is_special = hn::Gt(shifted, hn::Set(di, (31 << 23) - 1));
  // A denormal is 2^-14 plus the mantissa, less 2^-14; exact, and no operand is
  // a float denormal.
  const auto smallest = hn::Set(di, (127 - 14) << 23);
  const auto denormal =
      hn::BitCast(di, hn::Sub(hn::BitCast(d, hn::Add(shifted, smallest)),
                              hn::BitCast(d, smallest)));
  const auto is_denormal = hn::Lt(shifted, hn::Set(di, 1 << 23));
  const auto magnitude = hn::IfThenElse(
      is_denormal, denormal, hn::IfThenElse(is_special, special, normal));
  return hn::BitCast(d, hn::Or(magnitude, sign));
}

template <class D, class V>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> Float16FromFloat(D d, V v) {
  const hn::RebindToSigned<D> di;
  const auto all = hn::BitCast(di, v);
  const auto bits = hn::And(all, hn::Set(di, 0x7FFFFFFF));
  const auto sign = hn::And(hn::ShiftRight<16>(all), hn::Set(di, 0x8000));
  // A normal number goes as for bfloat16, with the exponent's bias changed on
  // the way.
  const auto is_odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(di, 1));
  const auto normal = hn::ShiftRight<13>(
      hn::Add(hn::Add(bits, is_odd), hn::Set(di, 0xFFF - ((127 - 15) << 23))));
  // For a denormal, the last place of 0.5 is 2^-24, float16's smallest step, so
  // that the addition does the rounding.
  const auto half = hn::Set(di, 126 << 23);
  const auto denormal = hn::Sub(
      hn::BitCast(di, hn::Add(hn::BitCast(d, bits), hn::BitCast(d, half))),
      half);
  const auto is_denormal = hn::Lt(bits, hn::Set(di, (127 - 14) << 23));
  // Infinity begins at 65520, half way to the step after the largest float16.
  const auto is_infinite = hn::Gt(bits, hn::Set(di, 0x477FEFFF));
  const auto magnitude =
      hn::IfThenElse(is_infinite, hn::Set(di, 0x7C00),
                     hn::IfThenElse(is_denormal, denormal, normal));
  const auto is_nan = hn::RebindMask(di, hn::IsNaN(v));
  return hn::IfThenElse(is_nan, hn::Set(di, 0x7E00), hn::Or(magnitude, sign));
}

template <DType kDType, class D>
HWY_INLINE hn::Vec<D> LoadFloats(D d, const StorageOf<kDType>* from) {
  if constexpr (kDType == DType::kFloat32) {
    return hn::LoadU(d, from);
  } else {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<uint16_t, D> d16;
    const auto bits = hn::PromoteTo(di, hn::LoadU(d16, from));
    if constexpr (kDType == DType::kBFloat16) {
      return FloatFromBFloat16(d, bits);
    } else {
      return FloatFromFloat16(d, bits);
    }
  }
}

// Loads two vectors' bfloat16 as floats. On vectors of several 128 bits four
// and four, which takes half the work of two vectors in order: of each 128 bits
// `low` has the first four, `high` the others.
template <class D, class V>
HWY_INLINE void LoadHalfBlocks(D d, const uint16_t* from, V& low, V& high) {
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
  low = LoadFloats<DType::kBFloat16>(d, from);
  high = LoadFloats<DType::kBFloat16>(d, from + hn::Lanes(d));
#else
  const hn::Repartition<uint16_t, D> d16;
  const auto bits = hn::LoadU(d16, from);
  const auto zero = hn::Zero(d16);
  low = hn::BitCast(d, hn::InterleaveLower(d16, zero, bits));
  high = hn::BitCast(d, hn::InterleaveUpper(d16, zero, bits));
#endif
}

// Puts what LoadHalfBlocks gave, or sums of such, in order.
template <class D, class V>
HWY_INLINE void OrderHalfBlocks([[maybe_unused]] D d, [[maybe_unused]] V& low,
                                [[maybe_unused]] V& high) {
#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE
  if constexpr (hn::MaxLanes(d) > 4) {
    const V first = hn::ConcatLowerLower(d, high, low);
    high = hn::ConcatUpperUpper(d, high, low);
    low = first;
  }
  if constexpr (hn::MaxLanes(d) == 16) {
    HWY_ALIGN static constexpr int32_t kMiddleBlocksSwapped[16] = {
        0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};
    const auto order = hn::SetTableIndices(d, kMiddleBlocksSwapped);
    low = hn::TableLookupLanes(low, order);
    high = hn::TableLookupLanes(high, order);
  }
#endif
}

// Stores the low halves.
template <class D, class VI>
HWY_INLINE void StoreHalves(D, VI v, uint16_t* to) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  hn::StoreU(hn::TruncateTo(d16, hn::BitCast(du, v)), d16, to);
}

template <DType kDType, bool kPlain = false, class D, class V>
HWY_INLINE void StoreFloats(D d, V v, StorageOf<kDType>* to) {
  if constexpr (kDType == DType::kFloat32) {
    hn::StoreU(v, d, to);
  } else if constexpr (kDType == DType::kBFloat16) {
    StoreHalves(d, BFloat16FromFloat<kPlain>(d, v), to);
  } else {
    StoreHalves(d, Float16FromFloat(d, v), to);
  }
}

// Stores two vectors, one behind the other; no lane is NaN. The upper halves of
// both make one vector without being shifted down first.
template <class D, class V>
HWY_INLINE void StoreBFloat16Pair(D d, V first, V second, uint16_t* to) {
#if HWY_TARGET == HWY_SCALAR
  StoreFloats<DType::kBFloat16, true>(d, first, to);
  StoreFloats<DType::kBFloat16, true>(d, second, to + 1);
#else
  const hn::Repartition<uint16_t, D> d16;
  const auto low = hn::BitCast(d16, RoundedToUpperHalf(d, first));
  const auto high = hn::BitCast(d16, RoundedToUpperHalf(d, second));
  hn::StoreU(hn::ConcatOdd(d16, high, low), d16, to);
#endif
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
