#ifndef OPTSTATE_KERNELS_REFERENCE_OPTIMIZER_REFERENCE_H_
#define OPTSTATE_KERNELS_REFERENCE_OPTIMIZER_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {

// The element-wise optimizers, operation by operation as torch.optim's
// single-tensor forms write them (Lion: lion-pytorch), in the floating-point
// type T: the truth that kernels are measured against (double), and what torch
// itself would get (float). Slow; for tests.
//
// T is float or double. Scalars are computed in double and rounded to T where
// they meet a tensor, as torch does.
template <typename T>
class OptimizerReference {
 public:
  OptimizerReference(OptimizerKind kind, uint32_t options,
                     absl::Span<const T> parameter);

  // Takes one step; `gradient` is unscaled and has as many elements as the
  // parameter.
  void Step(const Hyperparams& hyperparams, absl::Span<const T> gradient);

  const std::vector<T>& parameter() const { return parameter_; }
  // State arrays are in the order of OptimizerInfo::state_arrays; those that
  // the options do not bring are zeros.
  const std::vector<T>& state(int k) const { return state_[k]; }

  // Serves tests that start from a given state.
  std::vector<T>* mutable_state(int k) { return &state_[k]; }
  void set_step_count(int64_t step_count) { step_count_ = step_count; }

 private:
  void StepAdam(const Hyperparams& hyperparams, absl::Span<const T> gradient);
  void StepSgd(const Hyperparams& hyperparams, absl::Span<const T> gradient);
  void StepAdagrad(const Hyperparams& hyperparams,
                   absl::Span<const T> gradient);
  void StepRmsprop(const Hyperparams& hyperparams,
                   absl::Span<const T> gradient);
  void StepLion(const Hyperparams& hyperparams, absl::Span<const T> gradient);
  void StepNadam(const Hyperparams& hyperparams, absl::Span<const T> gradient);
  void StepRadam(const Hyperparams& hyperparams, absl::Span<const T> gradient);

  const OptimizerKind kind_;
  const uint32_t options_;
  int64_t step_count_ = 0;
  T mu_product_ = 1;  // NAdam
  std::vector<T> parameter_;
  std::vector<T> state_[kStateArraysMax];
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_REFERENCE_OPTIMIZER_REFERENCE_H_
