// Floats that are rounded to bfloat16 and stay floats. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_BFLOAT16_ROUND_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_BFLOAT16_ROUND_INL_H_
#undef OPTSTATE_KERNELS_CPU_BFLOAT16_ROUND_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_BFLOAT16_ROUND_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {

template <class D, class V>
HWY_INLINE V RoundToBFloat16(D d, V v) {
  return FloatFromBFloat16(d, BFloat16FromFloat(d, v));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
