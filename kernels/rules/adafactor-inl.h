// The element-wise parts of torch.optim.Adafactor. Per-target include.

#if defined(OPTSTATE_KERNELS_RULES_ADAFACTOR_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_ADAFACTOR_INL_H_
#undef OPTSTATE_KERNELS_RULES_ADAFACTOR_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_ADAFACTOR_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/power.h"
#include "kernels/rules/whole-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_ADAFACTOR_FACTORS_
#define OPTSTATE_KERNELS_RULES_ADAFACTOR_FACTORS_
namespace optstate::kernels {

// The values that a step knows before it sees the gradient.
struct AdafactorStep {
  double weight;  // of what is new in the variances: 1 - beta2
  double mean_min;
  float variance_min;
  // The factors of the descent: the relative step, the least size of the
  // parameter that it is multiplied by, and the size of an update from which on
  // it is cut.
  double relative_step;
  double size_min;
  double update_max;
  float decay;
};

inline AdafactorStep PrepareAdafactor(const UpdateInput& input) {
  const Hyperparams& h = input.hyperparams;
  // torch takes the epsilon of the parameter's dtype. Here it is the master's
  // that counts: what torch would have with float parameters.
  const double eps =
      h[adafactor::kEps1] < 0
          ? static_cast<double>(std::numeric_limits<float>::epsilon())
          : h[adafactor::kEps1];
  const double lr = h[adafactor::kLr];
  return {
      .weight = Power(static_cast<double>(input.step_count),
                      h[adafactor::kBeta2Decay]),
      .mean_min = eps,
      // Without it a gradient of 0 would be divided by 0.
      .variance_min = RoundToFloatNotZero(eps * eps),
      .relative_step =
          std::min(lr, 1 / std::sqrt(static_cast<double>(input.step_count))),
      .size_min = h[adafactor::kEps2],
      .update_max = h[adafactor::kD],
      .decay = RoundToFloat(lr * h[adafactor::kWeightDecay]),
  };
}

// Returns the larger one; a NaN, where torch has one, does not lose against the
// other.
OPTSTATE_HOST_DEVICE inline double AtLeast(double value, double min) {
  return value < min ? min : value;
}

OPTSTATE_HOST_DEVICE inline float Rounded(double value) {
  if (std::isnan(value)) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(value);
}

OPTSTATE_HOST_DEVICE inline double RootMeanSquare(double sum_of_squares,
                                                  size_t numel) {
  return std::sqrt(sum_of_squares / static_cast<double>(numel));
}

// Takes the sums of squares of all masters and of all updates.
OPTSTATE_HOST_DEVICE inline DescentFactors AdafactorDescent(
    const AdafactorStep& step, double master_squares, double update_squares,
    size_t numel) {
  const double size = RootMeanSquare(master_squares, numel);
  const double update = RootMeanSquare(update_squares, numel) / step.update_max;
  // Against a NaN the minimum wins, as Python's max() has it.
  const double alpha =
      step.relative_step * (step.size_min < size ? size : step.size_min);
  const double denom = 1 < update ? update : 1;
  return {step.decay, RoundToFloat(alpha / denom)};
}

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_ADAFACTOR_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// Computes average = torch.lerp(average, value, weight), rounded once: a row's
// or a column's variance.
OPTSTATE_OP float NextVariance(float average, double value, double weight) {
  // The base is the nearer value: the sum from the other one would cancel.
  const bool is_near_old = weight < 0.5;
  const double base = is_near_old ? average : value;
  const double change =
      ops::ScalarProduct(is_near_old ? weight : weight - 1, value - average);
  return Rounded(base + change);
}

// Returns the variance of an element whose parameter has no rows and columns.
template <class D, class V>
OPTSTATE_OP V NextElementVariance(D d, V variance, V grad,
                                  const LerpWeight& weight) {
  return ops::CanonicalNan(d,
                           Lerp(d, variance, ops::Product(grad, grad), weight));
}

template <class D, class V>
OPTSTATE_OP V Normalized(D d, V grad, V variance, float variance_min) {
  const V min = ops::Set(d, variance_min);
  // A NaN is not less.
  return ops::Div(
      grad, ops::Sqrt(ops::IfThenElse(ops::Lt(variance, min), min, variance)));
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
