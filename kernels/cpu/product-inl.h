// A product that is rounded before it is used. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_PRODUCT_INL_H_
#undef OPTSTATE_KERNELS_CPU_PRODUCT_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_PRODUCT_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
