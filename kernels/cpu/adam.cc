#include "kernels/cpu/adam.h"

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/adam_factors.h"
#include "kernels/cpu/highway_config.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer_kind.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adam.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/adam-inl.h"
#include "kernels/cpu/update-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_ADAM_CC_
#define OPTSTATE_KERNELS_CPU_ADAM_CC_
namespace optstate::cpu {

inline constexpr absl::string_view kAdamStateArrayNames[] = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

// [parameter dtype - 1]
struct KernelsOfGradient {
  UpdateKernel by_parameter[3];
};

// [gradient dtype - 1]
struct KernelsOfRule {
  KernelsOfGradient by_gradient[3];
};

// [optimizer - 1][amsgrad]
struct AdamKernels {
  KernelsOfRule by_optimizer[2][2];
};

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_ADAM_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {

template <OptimizerKind kKind, bool kAmsgrad, DType kGradient, DType kParameter>
constexpr UpdateKernel MakeKernel() {
  using Rule = Adam<kKind, kAmsgrad>;
  return {absl::MakeConstSpan(kAdamStateArrayNames, Rule::kStateArrays),
          kKind == OptimizerKind::kAdam ? &PrepareAdam : &PrepareAdamW,
          &UpdateTile<Rule, kGradient, kParameter>};
}

template <OptimizerKind kKind, bool kAmsgrad, DType kGradient>
constexpr KernelsOfGradient MakeKernelsOfGradient() {
  return {{MakeKernel<kKind, kAmsgrad, kGradient, DType::kFloat32>(),
           MakeKernel<kKind, kAmsgrad, kGradient, DType::kBFloat16>(),
           MakeKernel<kKind, kAmsgrad, kGradient, DType::kFloat16>()}};
}

template <OptimizerKind kKind, bool kAmsgrad>
constexpr KernelsOfRule MakeKernelsOfRule() {
  return {{MakeKernelsOfGradient<kKind, kAmsgrad, DType::kFloat32>(),
           MakeKernelsOfGradient<kKind, kAmsgrad, DType::kBFloat16>(),
           MakeKernelsOfGradient<kKind, kAmsgrad, DType::kFloat16>()}};
}

const AdamKernels& KernelsOfTarget() {
  static constexpr AdamKernels kKernels = {
      {{MakeKernelsOfRule<OptimizerKind::kAdam, false>(),
        MakeKernelsOfRule<OptimizerKind::kAdam, true>()},
       {MakeKernelsOfRule<OptimizerKind::kAdamW, false>(),
        MakeKernelsOfRule<OptimizerKind::kAdamW, true>()}}};
  return kKernels;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::cpu {
namespace {

constexpr auto kKernelsOfTarget = OPTSTATE_TARGET_TABLE(KernelsOfTarget);

template <typename Enum>
constexpr int IndexOf(Enum value) {
  return static_cast<int>(value) - 1;  // the enumerators count from 1
}

}  // namespace

const UpdateKernel* AdamKernel(const UpdateKernelKey& key, Target target) {
  return &kKernelsOfTarget.For(target)()
              .by_optimizer[IndexOf(key.optimizer)][key.amsgrad]
              .by_gradient[IndexOf(key.gradient)]
              .by_parameter[IndexOf(key.parameter)];
}

}  // namespace optstate::cpu

#endif  // HWY_ONCE
