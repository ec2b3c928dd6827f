#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/adam.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/rule_kernels-inl.h"
#include "kernels/rules/adam-inl.h"

OPTSTATE_DEFINE_RULE(Adam, Dispatch::kFixed)

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(Adam)
#endif  // HWY_ONCE
