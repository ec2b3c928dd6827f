// One step of a reduction (reduction_order.h). Per-target include.

#if defined(OPTSTATE_KERNELS_OPS_REDUCTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_OPS_REDUCTION_INL_H_
#undef OPTSTATE_KERNELS_OPS_REDUCTION_INL_H_
#else
#define OPTSTATE_KERNELS_OPS_REDUCTION_INL_H_
#endif

#include "kernels/ops/ops-inl.h"
#include "kernels/reduction.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// Takes an element into its accumulator, both doubles.
template <Reduction kReduction, class V>
OPTSTATE_OP V Taken(V accumulator, V element) {
  // The product is exact: 24 bits of mantissa make 48. So fusing it with the
  // addition would change nothing, here alone.
  if constexpr (kReduction == Reduction::kSumOfSquares) {
    return ops::Add(accumulator, ops::Mul(element, element));
  } else if constexpr (kReduction == Reduction::kSumOfAbsolutes) {
    return ops::Add(accumulator, ops::Abs(element));
  } else {
    const V magnitude = ops::Abs(element);
    return ops::IfThenElse(
        ops::Or(ops::Gt(magnitude, accumulator), ops::IsNaN(magnitude)),
        magnitude, accumulator);
  }
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
