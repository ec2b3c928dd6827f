// Conversions of elements of every dtype to and from floats. Per-target
// include.
//
// The conversions are written in integers (plus two float additions that are
// exact or rounded by IEEE's default rule), because the instructions for them
// differ between targets in rounding, denormals and NaN, and these do not.

#if defined(OPTSTATE_KERNELS_OPS_FLOAT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_OPS_FLOAT16_INL_H_
#undef OPTSTATE_KERNELS_OPS_FLOAT16_INL_H_
#else
#define OPTSTATE_KERNELS_OPS_FLOAT16_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "kernels/ops/ops-inl.h"
#include "proto/types/dtype.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// The type of an element in memory: float, or the 16 bits.
template <DType kDType>
using StorageOf =
    std::conditional_t<kDType == DType::kFloat32, float, uint16_t>;

// `bits` holds a bfloat16 in the low half of each lane.
template <class D, class VI>
OPTSTATE_OP ops::Vec<D> FloatFromBFloat16(D d, VI bits) {
  return ops::BitCast(d, ops::ShiftLeft<16>(bits));
}

// Returns bfloat16 in the upper half of each lane; the lower half is left over.
// No lane is NaN.
template <class D, class V>
OPTSTATE_OP ops::Vec<ops::RebindToUnsigned<D>> RoundedToUpperHalf(D, V v) {
  const ops::RebindToUnsigned<D> du;
  const auto bits = ops::BitCast(du, v);
  // Adds half a unit in the last place, less one when the result would be odd:
  // the carry rounds to nearest even, and into infinity where it must.
  const auto is_odd = ops::And(ops::ShiftRight<16>(bits), ops::Set(du, 1));
  return ops::Add(bits, ops::Add(is_odd, ops::Set(du, 0x7FFF)));
}

// Rounds to bfloat16. kPlain: no lane is NaN.
template <bool kPlain = false, class D, class V>
OPTSTATE_OP ops::Vec<ops::RebindToSigned<D>> BFloat16FromFloat(D d, V v) {
  const ops::RebindToSigned<D> di;
  const auto rounded = ops::ShiftRight<16>(RoundedToUpperHalf(d, v));
  if constexpr (kPlain) return ops::BitCast(di, rounded);
  const auto is_nan = ops::RebindMask(di, ops::IsNaN(v));
  return ops::IfThenElse(is_nan, ops::Set(di, 0x7FC0),
                         ops::BitCast(di, rounded));
}

// Rounds to bfloat16 and stays a float.
template <class D, class V>
OPTSTATE_OP V RoundToBFloat16(D d, V v) {
  return FloatFromBFloat16(d, BFloat16FromFloat(d, v));
}

// `bits` holds a float16 in the low half of each lane.
template <class D, class VI>
OPTSTATE_OP ops::Vec<D> FloatFromFloat16(D d, VI bits) {
  const ops::RebindToSigned<D> di;
  const auto sign = ops::ShiftLeft<16>(ops::And(bits, ops::Set(di, 0x8000)));
  const auto shifted = ops::ShiftLeft<13>(ops::And(bits, ops::Set(di, 0x7FFF)));
  const auto rebias = ops::Set(di, (127 - 15) << 23);
  const auto normal = ops::Add(shifted, rebias);
  // Infinity and NaN have an exponent that goes all the way to 255.
  const auto special = ops::Add(normal, rebias);
  const auto is_special = ops::Gt(shifted, ops::Set(di, (31 << 23) - 1));
  // A denormal is 2^-14 plus the mantissa, less 2^-14; exact, and no operand is
  // a float denormal.
  const auto smallest = ops::Set(di, (127 - 14) << 23);
  const auto denormal =
      ops::BitCast(di, ops::Sub(ops::BitCast(d, ops::Add(shifted, smallest)),
                                ops::BitCast(d, smallest)));
  const auto is_denormal = ops::Lt(shifted, ops::Set(di, 1 << 23));
  const auto magnitude = ops::IfThenElse(
      is_denormal, denormal, ops::IfThenElse(is_special, special, normal));
  return ops::BitCast(d, ops::Or(magnitude, sign));
}

template <class D, class V>
OPTSTATE_OP ops::Vec<ops::RebindToSigned<D>> Float16FromFloat(D d, V v) {
  const ops::RebindToSigned<D> di;
  const auto all = ops::BitCast(di, v);
  const auto bits = ops::And(all, ops::Set(di, 0x7FFFFFFF));
  const auto sign = ops::And(ops::ShiftRight<16>(all), ops::Set(di, 0x8000));
  // A normal number goes as for bfloat16, with the exponent's bias changed on
  // the way.
  const auto is_odd = ops::And(ops::ShiftRight<13>(bits), ops::Set(di, 1));
  const auto normal = ops::ShiftRight<13>(ops::Add(
      ops::Add(bits, is_odd), ops::Set(di, 0xFFF - ((127 - 15) << 23))));
  // For a denormal, the last place of 0.5 is 2^-24, float16's smallest step, so
  // that the addition does the rounding.
  const auto half = ops::Set(di, 126 << 23);
  const auto denormal = ops::Sub(
      ops::BitCast(di, ops::Add(ops::BitCast(d, bits), ops::BitCast(d, half))),
      half);
  const auto is_denormal = ops::Lt(bits, ops::Set(di, (127 - 14) << 23));
  // Infinity begins at 65520, half way to the step after the largest float16.
  const auto is_infinite = ops::Gt(bits, ops::Set(di, 0x477FEFFF));
  const auto magnitude =
      ops::IfThenElse(is_infinite, ops::Set(di, 0x7C00),
                      ops::IfThenElse(is_denormal, denormal, normal));
  const auto is_nan = ops::RebindMask(di, ops::IsNaN(v));
  return ops::IfThenElse(is_nan, ops::Set(di, 0x7E00),
                         ops::Or(magnitude, sign));
}

template <DType kDType, class D>
OPTSTATE_OP ops::Vec<D> LoadFloats(D d, const StorageOf<kDType>* from) {
  if constexpr (kDType == DType::kFloat32) {
    return ops::LoadU(d, from);
  } else {
    const ops::RebindToSigned<D> di;
    const ops::Rebind<uint16_t, D> d16;
    const auto bits = ops::PromoteTo(di, ops::LoadU(d16, from));
    if constexpr (kDType == DType::kBFloat16) {
      return FloatFromBFloat16(d, bits);
    } else {
      return FloatFromFloat16(d, bits);
    }
  }
}

// Stores the low halves.
template <class D, class VI>
OPTSTATE_OP void StoreHalves(D, VI v, uint16_t* to) {
  const ops::RebindToUnsigned<D> du;
  const ops::Rebind<uint16_t, D> d16;
  ops::StoreU(ops::TruncateTo(d16, ops::BitCast(du, v)), d16, to);
}

template <DType kDType, bool kPlain = false, class D, class V>
OPTSTATE_OP void StoreFloats(D d, V v, StorageOf<kDType>* to) {
  if constexpr (kDType == DType::kFloat32) {
    ops::StoreU(v, d, to);
  } else if constexpr (kDType == DType::kBFloat16) {
    StoreHalves(d, BFloat16FromFloat<kPlain>(d, v), to);
  } else {
    StoreHalves(d, Float16FromFloat(d, v), to);
  }
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
