#ifndef OPTSTATE_KERNELS_CPU_TARGET_TABLE_H_
#define OPTSTATE_KERNELS_CPU_TARGET_TABLE_H_

// A table from a target to the function compiled for it. For .cc files that
// were compiled once per target with foreach_target.h, in their HWY_ONCE
// section:
//
//   constexpr auto kTable = OPTSTATE_TARGET_TABLE(Function);
//   kTable.For(target)(arguments);

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"
// This include comes after highway_config.h.
#include "hwy/highway.h"

namespace optstate::kernels::cpu {

template <typename Function>
struct TargetTable {
  // The order is Highway's: its dynamic targets by bit, then the fallback.
  Function functions[HWY_MAX_DYNAMIC_TARGETS + 1];

  // Returns the function of `target`, which is one of SupportedTargets().
  constexpr Function For(Target target) const {
    constexpr int kLowestBit =
        HWY_HIGHEST_TARGET_BIT + 1 - HWY_MAX_DYNAMIC_TARGETS;
    if (target == HWY_SCALAR || target == HWY_EMU128) {
      return functions[HWY_MAX_DYNAMIC_TARGETS];
    }
    return functions[__builtin_ctzll(static_cast<uint64_t>(target)) -
                     kLowestBit];
  }
};

}  // namespace optstate::kernels::cpu

#define OPTSTATE_TARGET_TABLE(FUNCTION)                                 \
  ::optstate::kernels::cpu::TargetTable<decltype(&HWY_STATIC_DISPATCH(  \
      FUNCTION))> {                                                     \
    { HWY_CHOOSE_TARGET_LIST(FUNCTION), HWY_CHOOSE_FALLBACK(FUNCTION) } \
  }

#endif  // OPTSTATE_KERNELS_CPU_TARGET_TABLE_H_
