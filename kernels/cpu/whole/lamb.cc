// LAMB, as its paper (arXiv 1904.00962) has it: decoupled decay
// within the norm, bias correction, and a trust ratio for every parameter.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/whole_rules.h"
#include "kernels/factors.h"
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
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/moments-inl.h"
#include "kernels/cpu/product-inl.h"
#include "kernels/cpu/whole-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_WHOLE_LAMB_CC_
#define OPTSTATE_KERNELS_CPU_WHOLE_LAMB_CC_
namespace optstate::cpu {

inline uint64_t LambWorkspaceElements(absl::Span<const int64_t>) { return 0; }

// The factors of a step. With c = sqrt(1 - beta2^t), as in kernels/README.md:
struct LambFactors {
  float decay;
  // The factors of exp_avg and of exp_avg_sq: see factors.h.
  float exp_avg_weight;
  float square_gain;
  float square_keep;
  float square_loss;
  float eps;        // eps * c
  float step_size;  // c / (1 - beta1^t)
};

inline LambFactors PrepareLamb(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  const double beta1 = h[adam::kBeta1];
  const double beta2 = h[adam::kBeta2];
  const double correction =
      std::sqrt(1 - IntegerPower(beta2, input.step_count));
  return {
      .decay = RoundToFloat(h[adam::kWeightDecay]),
      .exp_avg_weight = AverageWeight(beta1),
      .square_gain = AverageGain(beta2),
      .square_keep = AverageKeep(beta2),
      .square_loss = AverageLoss(beta2),
      .eps = RoundToFloatNotZero(h[adam::kEps] * correction),
      .step_size = RoundToFloat(correction /
                                (1 - IntegerPower(beta1, input.step_count))),
  };
}

inline double TrustRatio(double master_norm, double update_norm) {
  return master_norm != 0 && update_norm != 0 ? master_norm / update_norm : 1;
}

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_WHOLE_LAMB_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void ComputeLamb(const UpdateInput& input, const WholeView& view) {
  const LambFactors factors = PrepareLamb(input);
  // The update waits in new_master for its norm.
  ForVectors<4, 3>(
      view.numel, {view.gradient, view.master, view.state[0], view.state[1]},
      {view.new_state[0], view.new_state[1], view.new_master},
      [factors](auto d, const auto& in, const auto& out, size_t i) HWY_ATTR {
        const auto grad = hn::LoadU(d, in[0] + i);
        const auto exp_avg =
            CanonicalNan(d, NextAverage(d, grad, hn::LoadU(d, in[2] + i),
                                        factors.exp_avg_weight));
        const auto exp_avg_sq = CanonicalNan(
            d, NextSquareAverage(d, grad, hn::LoadU(d, in[3] + i),
                                 factors.square_gain, factors.square_keep,
                                 factors.square_loss));
        const auto denom =
            hn::Add(hn::Sqrt(exp_avg_sq), hn::Set(d, factors.eps));
        const auto change =
            hn::Div(Product(hn::Set(d, factors.step_size), exp_avg), denom);
        const auto decay =
            DecoupledDecay(d, hn::LoadU(d, in[1] + i), factors.decay);
        hn::StoreU(exp_avg, d, out[0] + i);
        hn::StoreU(exp_avg_sq, d, out[1] + i);
        hn::StoreU(hn::Add(change, decay), d, out[2] + i);
      });
  const double trust = TrustRatio(NormOf(view.master, view.numel),
                                  NormOf(view.new_master, view.numel));
  Descend(view.master, view.new_master, /*decay=*/0,
          RoundToFloat(input.hyperparams[adam::kLr] * trust), view.numel,
          view.new_master);
}

const WholeKernel& LambOfTarget() {
  static constexpr WholeKernel kKernel = {
      .squares = 0b10,
      .workspace_elements = &LambWorkspaceElements,
      .check_shape = &AnyShape,
      .compute = &ComputeLamb,
  };
  return kKernel;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_WHOLE_RULE(LambKernel, LambOfTarget)
#endif  // HWY_ONCE
