// The arithmetic that update rules and formats are written in. Per-target
// include.
//
// One source has two forms:
//   vectors  of Highway, compiled once per target, in the namespace of that
//            target below optstate::kernels::cpu: the usual form
//   scalars  of one float, which is what a CUDA thread has, in
//            optstate::kernels::scalar: in files that include scalar_ops.h
//            first
// A source that is to have both says
//
//   OPTSTATE_BEFORE_OPS();
//   namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {
//   template <class D, class V>
//   OPTSTATE_OP V Twice(D d, V v) { return ops::Mul(ops::Set(d, 2), v); }
//   }
//   OPTSTATE_AFTER_OPS();
//
// where D is a tag (ops::Set needs to know of what) and V what the tag stands
// for. It uses nothing of arithmetic but what is in the namespace ops: no
// multiplication there is fused with an addition, and division and square root
// are IEEE's. So both forms have equal bits.
//
// The names are Highway's, and mean what its documentation says, with these
// beside them:
//   Product(a, b)        a product that is rounded whatever is done with it
//   ScalarProduct(a, b)  the same of two doubles, in both forms
//   Maximum(a, b)        torch.maximum: a NaN on either side wins
//   CanonicalNan(d, v)   v with every NaN replaced by the one that is written
//   MulHigh16(d, x, f)   x * f / 2^16 of numbers of 16 bits
//   Lookup8(d, table, i) table[i % 8]; the table has its 8 values twice
//   StoreLowBytes        stores integers as bytes, saturated

#if defined(OPTSTATE_KERNELS_OPS_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_OPS_OPS_INL_H_
#undef OPTSTATE_KERNELS_OPS_OPS_INL_H_
#else
#define OPTSTATE_KERNELS_OPS_OPS_INL_H_
#endif

#include <cstdint>

#ifndef OPTSTATE_KERNELS_OPS_SCALAR_OPS_H_
#include "kernels/ops/vector_ops-inl.h"
#endif

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {
namespace ops {

// The one NaN that kernels write: x86, Arm and CUDA each make a different one,
// and results are compared bit by bit. (Ask with IsNaN: Highway 1.0.3 says of a
// NaN on AVX2 that it is not unequal to itself.)
inline constexpr uint32_t kCanonicalNanBits = 0x7FC00000;

// kPlain: no lane is NaN.
template <bool kPlain = false, class D, class V>
OPTSTATE_OP V CanonicalNan(D d, V v) {
  if constexpr (kPlain) return v;
  const RebindToUnsigned<D> du;
  const V nan = BitCast(d, Set(du, kCanonicalNanBits));
  return IfThenElse(IsNaN(v), nan, v);
}

// Highway's Max leaves it open what becomes of NaN.
template <class V>
OPTSTATE_OP V Maximum(V a, V b) {
  return IfThenElse(Or(Lt(a, b), IsNaN(b)), b, a);
}

}  // namespace ops
}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
