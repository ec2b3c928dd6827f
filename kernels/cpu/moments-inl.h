// Averages and weight decay that several rules have. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_MOMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_MOMENTS_INL_H_
#undef OPTSTATE_KERNELS_CPU_MOMENTS_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_MOMENTS_INL_H_
#endif

#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Adds weight decay to the gradient.
template <class D, class V>
HWY_INLINE V WithL2Decay(D d, V grad, V master, float decay) {
  // Without decay an infinite master must not make NaN of the gradient.
  const V factor = hn::Set(d, decay);
  return hn::Add(grad, hn::IfThenElseZero(hn::Gt(factor, hn::Zero(d)),
                                          Product(factor, master)));
}

// kPlain, here and in float16-inl.h, leaves out what infinities and NaN need;
// it is for rules whose result is NaN where that would have been needed
// (rule-inl.h).

// Returns what decoupled weight decay subtracts from the master.
template <bool kPlain = false, class D, class V>
HWY_INLINE V DecoupledDecay(D d, V master, float decay) {
  if constexpr (kPlain) return Product(hn::Set(d, decay), master);
  // An infinite master has no decay: it stays infinite, as in torch.
  const V infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  return hn::IfThenElseZero(hn::Lt(hn::Abs(master), infinity),
                            Product(hn::Set(d, decay), master));
}

// Behaves as torch.lerp; `weight` is AverageWeight of factors.h. kPlain: it is
// positive.
template <bool kPlain = false, class D, class V>
HWY_INLINE V NextAverage(D d, V value, V average, float weight) {
  const V w = hn::Set(d, weight);
  V start = average;
  if constexpr (!kPlain) {
    start = hn::IfThenElse(hn::Gt(w, hn::Zero(d)), average, value);
  }
  return hn::Add(start, Product(w, hn::Sub(value, average)));
}

// Returns the average that gains `gain`; `keep` and `loss` are as in factors.h.
template <class D, class V>
HWY_INLINE V NextFiniteSum(D d, V gain, V average, float keep, float loss) {
  const V kept = Product(hn::Set(d, keep), average);
  const V lost = Product(hn::Set(d, loss), average);
  return hn::Add(kept, hn::Sub(gain, lost));
}

// Returns the average where it may be infinite: then it stays so, as in torch,
// and does not turn NaN.
template <class D, class V, class M>
HWY_INLINE V NextSum(D d, V gain, V average, M is_infinite, float keep,
                     float loss) {
  return hn::IfThenElse(is_infinite, hn::Add(average, gain),
                        NextFiniteSum(d, gain, average, keep, loss));
}

// Returns the average of squares; `gain`, `keep` and `loss` are as in
// factors.h.
template <bool kPlain = false, class D, class V>
HWY_INLINE V NextSquareAverage(D d, V grad, V average, float gain, float keep,
                               float loss) {
  const V gained = Product(Product(hn::Set(d, gain), grad), grad);
  if constexpr (kPlain) return NextFiniteSum(d, gained, average, keep, loss);
  const V infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  return NextSum(d, gained, average, hn::Eq(average, infinity), keep, loss);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
