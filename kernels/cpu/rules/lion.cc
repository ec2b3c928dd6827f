#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/rule_kernels.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rules/lion.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/rule_kernels-inl.h"
#include "kernels/rules/lion-inl.h"

OPTSTATE_DEFINE_RULE(Lion, Dispatch::kAny)

#if HWY_ONCE
#include "kernels/cpu/rules.h"
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_RULE(Lion)
#endif  // HWY_ONCE
