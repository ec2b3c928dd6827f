#ifndef OPTSTATE_KERNELS_CPU_RULE_KERNELS_H_
#define OPTSTATE_KERNELS_CPU_RULE_KERNELS_H_

#include <cstdint>

#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

namespace optstate::kernels::cpu {

inline constexpr int kDTypes = 3;
// The parameter kinds: the dtypes, and bfloat16 as the upper half of its
// master.
inline constexpr int kParameterKinds = 4;
inline constexpr int kStateFormats = 3;

// The kernels of one rule, for one target.
struct RuleKernels {
  // [state format - 1][gradient - 1][parameter - 1, 3 when it is split]
  UpdateKernel kernels[kStateFormats][kDTypes][kParameterKinds];

  constexpr UpdateKernel& Of(StateFormat state, DType gradient, DType parameter,
                             MasterFormat master) {
    return kernels[static_cast<int>(state) - 1][static_cast<int>(gradient) - 1]
                  [KindOf(parameter, master)];
  }
  constexpr const UpdateKernel& Of(StateFormat state, DType gradient,
                                   DType parameter, MasterFormat master) const {
    return kernels[static_cast<int>(state) - 1][static_cast<int>(gradient) - 1]
                  [KindOf(parameter, master)];
  }

 private:
  static constexpr int KindOf(DType parameter, MasterFormat master) {
    return master == MasterFormat::kSplit ? kParameterKinds - 1
                                          : static_cast<int>(parameter) - 1;
  }
};

// The function that a rule's file exports: it returns the kernels for these
// options of its optimizer. The values are enumerators and bits that exist.
using RuleFunction = const RuleKernels& (*)(OptimizerKind kind,
                                            uint32_t options, Target target);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_RULE_KERNELS_H_
