// All the rules that rules.h lists. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_ALL_RULES_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_ALL_RULES_INL_H_
#undef OPTSTATE_KERNELS_RULES_ALL_RULES_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_ALL_RULES_INL_H_
#endif

// IWYU pragma: begin_exports
#include "kernels/rules/adagrad-inl.h"
#include "kernels/rules/adam-inl.h"
#include "kernels/rules/lion-inl.h"
#include "kernels/rules/nadam-inl.h"
#include "kernels/rules/radam-inl.h"
#include "kernels/rules/rmsprop-inl.h"
#include "kernels/rules/rules.h"
#include "kernels/rules/sgd-inl.h"
// IWYU pragma: end_exports

#endif  // per-target include guard
