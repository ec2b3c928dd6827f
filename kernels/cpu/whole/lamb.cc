// The kernel of LAMB (rules/lamb-inl.h).

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/whole_rules.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/whole/lamb.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/whole-inl.h"
#include "kernels/rules/lamb-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_WHOLE_LAMB_CC_
#define OPTSTATE_KERNELS_CPU_WHOLE_LAMB_CC_
namespace optstate::kernels::cpu {

inline uint64_t LambWorkspaceElements(absl::Span<const int64_t>) { return 0; }

}  // namespace optstate::kernels::cpu
#endif  // OPTSTATE_KERNELS_CPU_WHOLE_LAMB_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void ComputeLamb(const UpdateInput& input, const WholeView& view) {
  const LambFactors factors = PrepareLamb(input);
  // The update waits in new_master for its norm.
  ForVectors<4, 3>(
      view.numel, {view.gradient, view.master, view.state[0], view.state[1]},
      {view.new_state[0], view.new_state[1], view.new_master},
      [factors](auto d, const auto& in, const auto& out, size_t i) HWY_ATTR {
        auto exp_avg = hn::LoadU(d, in[2] + i);
        auto exp_avg_sq = hn::LoadU(d, in[3] + i);
        const auto update =
            LambUpdate(d, factors, hn::LoadU(d, in[0] + i),
                       hn::LoadU(d, in[1] + i), exp_avg, exp_avg_sq);
        hn::StoreU(exp_avg, d, out[0] + i);
        hn::StoreU(exp_avg_sq, d, out[1] + i);
        hn::StoreU(update, d, out[2] + i);
      });
  const DescentFactors descent = LambDescent(
      input.hyperparams[adam::kLr], SumOfSquares(view.master, view.numel),
      SumOfSquares(view.new_master, view.numel));
  Descend(view.master, view.new_master, descent.decay, descent.step, view.numel,
          view.new_master);
}

const WholeKernel& LambOfTarget() {
  static constexpr WholeKernel kKernel = {
      .workspace_elements = &LambWorkspaceElements,
      .check_shape = &AnyShape,
      .compute = &ComputeLamb,
  };
  return kKernel;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_WHOLE_RULE(LambKernel, LambOfTarget)
#endif  // HWY_ONCE
