// The operations of ops-inl.h on vectors: Highway's own, and what it lacks.
// Per-target include, of ops-inl.h alone.

#if defined(OPTSTATE_KERNELS_OPS_VECTOR_OPS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_OPS_VECTOR_OPS_INL_H_
#undef OPTSTATE_KERNELS_OPS_VECTOR_OPS_INL_H_
#else
#define OPTSTATE_KERNELS_OPS_VECTOR_OPS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/ops/host_device.h"

// These do not change from target to target.
#ifndef OPTSTATE_OPS_NAMESPACE
#define OPTSTATE_OPS_NAMESPACE cpu::HWY_NAMESPACE
#define OPTSTATE_BEFORE_OPS() HWY_BEFORE_NAMESPACE()
#define OPTSTATE_AFTER_OPS() HWY_AFTER_NAMESPACE()
#define OPTSTATE_OP HWY_INLINE
#define OPTSTATE_SELDOM_OP HWY_NOINLINE
#define OPTSTATE_UNLIKELY(condition) HWY_UNLIKELY(condition)
#endif

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace ops {

// NOLINTBEGIN(misc-unused-using-decls)
using hn::Lanes;
using hn::Rebind;
using hn::RebindMask;
using hn::RebindToSigned;
using hn::RebindToUnsigned;
using hn::Vec;

using hn::BitCast;
using hn::ConvertTo;
using hn::GetLane;
using hn::Iota;
using hn::LoadU;
using hn::PromoteTo;
using hn::Set;
using hn::StoreU;
using hn::TruncateTo;
using hn::Zero;

using hn::Abs;
using hn::Add;
using hn::CopySign;
using hn::CopySignToAbs;
using hn::Div;
using hn::Min;
using hn::Mul;
using hn::Neg;
using hn::Sqrt;
using hn::Sub;

using hn::And;
using hn::Or;
using hn::ShiftLeft;
using hn::ShiftRight;
using hn::Xor;

using hn::Eq;
using hn::Ge;
using hn::Gt;
using hn::IfThenElse;
using hn::IfThenElseZero;
using hn::IfThenZeroElse;
using hn::IsNaN;
using hn::Lt;
using hn::VecFromMask;
// NOLINTEND(misc-unused-using-decls)

// The tag of one lane.
using OneTag = hn::CappedTag<float, 1>;

// GCC fuses a multiplication and an addition wherever the target can, across
// statements and even when both are intrinsics, unless told -ffp-contract=off.
// Equal bits on every target must not hang on a flag, so the product passes
// through an empty statement that the optimiser cannot look into; it costs no
// instruction. Clang fuses within one expression only, which calls to Highway
// are not.
template <class V>
HWY_INLINE V Product(V a, V b) {
  V product = hn::Mul(a, b);
#if HWY_COMPILER_GCC_ACTUAL && HWY_ARCH_X86
  asm("" : "+v"(product.raw));
#elif HWY_COMPILER_GCC_ACTUAL && HWY_ARCH_ARM_A64 && HWY_HAVE_SCALABLE
  asm("" : "+w"(product));
#elif HWY_COMPILER_GCC_ACTUAL && HWY_ARCH_ARM_A64
  asm("" : "+w"(product.raw));
#endif
  return product;
}

HWY_INLINE double ScalarProduct(double a, double b) {
  const hn::CappedTag<double, 1> d;
  return hn::GetLane(Product(hn::Set(d, a), hn::Set(d, b)));
}

template <class DI, class VI>
HWY_INLINE VI MulHigh16(DI di, VI x, uint16_t factor) {
#if HWY_TARGET == HWY_SCALAR
  return hn::ShiftRight<16>(hn::Mul(x, hn::Set(di, factor)));
#else
  const hn::Repartition<uint16_t, DI> d16;
  return hn::BitCast(di,
                     hn::MulHigh(hn::BitCast(d16, x), hn::Set(d16, factor)));
#endif
}

template <class D, class VI>
HWY_INLINE hn::Vec<D> Lookup8(D d, const float* table, VI index) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  return hn::TableLookupLanes(hn::LoadU(d, table),
                              hn::IndicesFromVec(d, index));
#else
  const hn::RebindToSigned<D> di;
  return hn::GatherIndex(d, table, hn::And(index, hn::Set(di, 7)));
#endif
}

template <class D8, class VI>
HWY_INLINE void StoreLowBytes(D8 d8, VI v, hn::TFromD<D8>* to) {
  hn::StoreU(hn::DemoteTo(d8, v), d8, to);
}

}  // namespace ops
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
