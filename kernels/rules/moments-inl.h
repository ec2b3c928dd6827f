// Averages and weight decay that several rules have. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_MOMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_MOMENTS_INL_H_
#undef OPTSTATE_KERNELS_RULES_MOMENTS_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_MOMENTS_INL_H_
#endif

#include <limits>

#include "kernels/ops/ops-inl.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// Adds weight decay to the gradient.
template <class D, class V>
OPTSTATE_OP V WithL2Decay(D d, V grad, V master, float decay) {
  // Without decay an infinite master must not make NaN of the gradient.
  const V factor = ops::Set(d, decay);
  return ops::Add(grad, ops::IfThenElseZero(ops::Gt(factor, ops::Zero(d)),
                                            ops::Product(factor, master)));
}

// kPlain, here and in float16-inl.h, leaves out what infinities and NaN need;
// it is for rules whose result is NaN where that would have been needed
// (rule-inl.h).

// Returns what decoupled weight decay subtracts from the master.
template <bool kPlain = false, class D, class V>
OPTSTATE_OP V DecoupledDecay(D d, V master, float decay) {
  if constexpr (kPlain) return ops::Product(ops::Set(d, decay), master);
  // An infinite master has no decay: it stays infinite, as in torch.
  const V infinity = ops::Set(d, std::numeric_limits<float>::infinity());
  return ops::IfThenElseZero(ops::Lt(ops::Abs(master), infinity),
                             ops::Product(ops::Set(d, decay), master));
}

// Behaves as torch.lerp; `weight` is AverageWeight of factors.h. kPlain: it is
// positive.
template <bool kPlain = false, class D, class V>
OPTSTATE_OP V NextAverage(D d, V value, V average, float weight) {
  const V w = ops::Set(d, weight);
  V start = average;
  if constexpr (!kPlain) {
    start = ops::IfThenElse(ops::Gt(w, ops::Zero(d)), average, value);
  }
  return ops::Add(start, ops::Product(w, ops::Sub(value, average)));
}

// Returns the average that gains `gain`; `keep` and `loss` are as in factors.h.
template <class D, class V>
OPTSTATE_OP V NextFiniteSum(D d, V gain, V average, float keep, float loss) {
  const V kept = ops::Product(ops::Set(d, keep), average);
  const V lost = ops::Product(ops::Set(d, loss), average);
  return ops::Add(kept, ops::Sub(gain, lost));
}

// Returns the average where it may be infinite: then it stays so, as in torch,
// and does not turn NaN.
template <class D, class V, class M>
OPTSTATE_OP V NextSum(D d, V gain, V average, M is_infinite, float keep,
                      float loss) {
  return ops::IfThenElse(is_infinite, ops::Add(average, gain),
                         NextFiniteSum(d, gain, average, keep, loss));
}

// Returns the average of squares; `gain`, `keep` and `loss` are as in
// factors.h.
template <bool kPlain = false, class D, class V>
OPTSTATE_OP V NextSquareAverage(D d, V grad, V average, float gain, float keep,
                                float loss) {
  const V gained = ops::Product(ops::Product(ops::Set(d, gain), grad), grad);
  if constexpr (kPlain) return NextFiniteSum(d, gained, average, keep, loss);
  const V infinity = ops::Set(d, std::numeric_limits<float>::infinity());
  return NextSum(d, gained, average, ops::Eq(average, infinity), keep, loss);
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
