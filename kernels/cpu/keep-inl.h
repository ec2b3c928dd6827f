// The choice of what is kept of the vectors that a kernel overwrites.
// Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_KEEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_KEEP_INL_H_
#undef OPTSTATE_KERNELS_CPU_KEEP_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_KEEP_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/rules/rule-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {

// The values that are kept of vectors that are overwritten: see undo.h.
enum class Keep { kNothing, kOldValues, kXor };

template <class Rule, class Arrays>
constexpr Keep KeepOf() {
  if constexpr (HasHalves<Rule>() && Arrays::kHasFloatState) {
    if (Rule::kIsSeparable && Rule::kStates == 0b011) return Keep::kXor;
  }
  return Keep::kOldValues;
}

template <Keep kKeep>
constexpr Keep KeepOfOne() {
  return kKeep == Keep::kXor ? Keep::kOldValues : kKeep;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
