// The element-wise parts that optimizers of whole parameters share. Per-target
// include.

#if defined(OPTSTATE_KERNELS_RULES_WHOLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_WHOLE_INL_H_
#undef OPTSTATE_KERNELS_RULES_WHOLE_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_WHOLE_INL_H_
#endif

#include <cmath>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/moments-inl.h"

#ifndef OPTSTATE_KERNELS_RULES_WHOLE_FACTORS_
#define OPTSTATE_KERNELS_RULES_WHOLE_FACTORS_
namespace optstate::kernels {

// The weight of torch.lerp, any number: base + weight * (end - start), where
// the base is the nearer of the two.
struct LerpWeight {
  bool is_near_end;
  float weight;
};

inline LerpWeight MakeLerpWeight(double weight) {
  const bool is_near_end = std::abs(weight) >= 0.5;
  return {is_near_end, RoundToFloat(is_near_end ? weight - 1 : weight)};
}

// The factors of Descended.
struct DescentFactors {
  float decay;
  float step;
};

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_WHOLE_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

template <class D, class V>
OPTSTATE_OP V Lerp(D d, V start, V end, const LerpWeight& weight) {
  const V base = weight.is_near_end ? end : start;
  return ops::Add(
      base, ops::Product(ops::Set(d, weight.weight), ops::Sub(end, start)));
}

// Returns master - (decay * master + step * update). Decay and update are added
// first: the master is rounded once a step.
template <class D, class V>
OPTSTATE_OP V Descended(D d, V master, V update, float decay, float step) {
  const V descent = ops::Product(ops::Set(d, step), update);
  const V change = ops::Add(DecoupledDecay(d, master, decay), descent);
  return ops::CanonicalNan(d, ops::Sub(master, change));
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
