// The element-wise parts of torch.optim.Muon. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_MUON_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_MUON_INL_H_
#undef OPTSTATE_KERNELS_RULES_MUON_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_MUON_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/factors.h"
#include "kernels/ops/float16-inl.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/whole-inl.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_MUON_FACTORS_
#define OPTSTATE_KERNELS_RULES_MUON_FACTORS_
namespace optstate::kernels {

struct MuonWeights {
  LerpWeight of_gradient;
  LerpWeight of_buffer;
};

inline MuonWeights PrepareMuon(const Hyperparams& h) {
  return {MakeLerpWeight(1 - h[muon::kMomentum]),
          MakeLerpWeight(h[muon::kNesterov] != 0 ? h[muon::kMomentum] : 1)};
}

inline double AdjustedRatio(double adjust_lr, absl::Span<const int64_t> shape) {
  const auto rows = static_cast<double>(shape[0]);
  const auto columns = static_cast<double>(shape[1]);
  if (adjust_lr == 0) return std::sqrt(std::max(1.0, rows / columns));
  if (adjust_lr == 1) return 0.2 * std::sqrt(std::max(rows, columns));
  if (adjust_lr == 2) return std::sqrt(rows / columns);
  return 1;
}

// Bounds the steps: torch refuses 100 and more, and a step must end.
inline int NewtonSchulzSteps(double steps) {
  return static_cast<int>(std::clamp(steps, 0.0, 99.0));
}

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_MUON_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// Updates the momentum; returns, rounded to bfloat16, what is to be
// orthogonalised.
template <class D, class V>
OPTSTATE_OP V MuonMomentum(D d, const MuonWeights& weights, V grad, V& buffer) {
  buffer = ops::CanonicalNan(d, Lerp(d, buffer, grad, weights.of_gradient));
  return RoundToBFloat16(d, Lerp(d, grad, buffer, weights.of_buffer));
}

OPTSTATE_OP float RoundedToBFloat16(double value) {
  const ops::OneTag d;
  return ops::GetLane(RoundToBFloat16(d, ops::Set(d, RoundToFloat(value))));
}

// Returns the Frobenius norm: divided by it, no singular value is above 1. NaN
// where torch has one.
OPTSTATE_OP float MuonDivisor(double eps, double sum_of_squares) {
  const float norm = RoundedToBFloat16(std::sqrt(sum_of_squares));
  const float min = RoundedToBFloat16(eps);
  return norm < min ? min : norm;
}

template <class D, class V>
OPTSTATE_OP V MuonNormalized(D d, V x, float divisor) {
  return RoundToBFloat16(d, ops::Div(x, ops::Set(d, divisor)));
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
