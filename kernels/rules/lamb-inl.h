// LAMB, as its paper (arXiv 1904.00962) has it: decoupled decay within the
// norm, bias correction, and a trust ratio for every parameter. Per-target
// include.

#if defined(OPTSTATE_KERNELS_RULES_LAMB_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_LAMB_INL_H_
#undef OPTSTATE_KERNELS_RULES_LAMB_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_LAMB_INL_H_
#endif

#include <cmath>

#include "kernels/factors.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/moments-inl.h"
#include "kernels/rules/whole-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

#ifndef OPTSTATE_KERNELS_RULES_LAMB_FACTORS_
#define OPTSTATE_KERNELS_RULES_LAMB_FACTORS_
namespace optstate::kernels {

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

OPTSTATE_HOST_DEVICE inline double TrustRatio(double master_norm,
                                              double update_norm) {
  return master_norm != 0 && update_norm != 0 ? master_norm / update_norm : 1;
}

// Takes the sums of squares of all masters and of all updates. The decay is in
// the update.
OPTSTATE_HOST_DEVICE inline DescentFactors LambDescent(double lr,
                                                       double master_squares,
                                                       double update_squares) {
  const double trust =
      TrustRatio(std::sqrt(master_squares), std::sqrt(update_squares));
  return {0, RoundToFloat(lr * trust)};
}

}  // namespace optstate::kernels
#endif  // OPTSTATE_KERNELS_RULES_LAMB_FACTORS_

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// Updates both moments; returns what the master descends by, before the trust
// ratio and the learning rate.
template <class D, class V>
OPTSTATE_OP V LambUpdate(D d, const LambFactors& factors, V grad, V master,
                         V& exp_avg, V& exp_avg_sq) {
  exp_avg = ops::CanonicalNan(
      d, NextAverage(d, grad, exp_avg, factors.exp_avg_weight));
  exp_avg_sq = ops::CanonicalNan(
      d, NextSquareAverage(d, grad, exp_avg_sq, factors.square_gain,
                           factors.square_keep, factors.square_loss));
  const V denom = ops::Add(ops::Sqrt(exp_avg_sq), ops::Set(d, factors.eps));
  const V change =
      ops::Div(ops::Product(ops::Set(d, factors.step_size), exp_avg), denom);
  return ops::Add(change, DecoupledDecay(d, master, factors.decay));
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
