#ifndef OPTSTATE_KERNELS_REFERENCE_ADAM_REFERENCE_H_
#define OPTSTATE_KERNELS_REFERENCE_ADAM_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/hyperparams.h"
#include "proto/types/optimizer_kind.h"

namespace optstate {

// Adam and AdamW, operation by operation as torch.optim's single-tensor form
// writes them, in the floating-point type T: the truth that kernels are
// measured against (double), and what torch itself would get (float). Slow;
// for tests.
//
// T is float or double. Scalars are computed in double and rounded to T where
// they meet a tensor, as torch does.
template <typename T>
class AdamReference {
 public:
  AdamReference(OptimizerKind kind, bool amsgrad, absl::Span<const T> parameter)
      : kind_(kind),
        amsgrad_(amsgrad),
        parameter_(parameter.begin(), parameter.end()),
        exp_avg_(parameter.size()),
        exp_avg_sq_(parameter.size()),
        max_exp_avg_sq_(parameter.size()) {}

  // One step; `gradient` is unscaled and has as many elements as the parameter.
  void Step(const Hyperparams& hyperparams, absl::Span<const T> gradient);

  const std::vector<T>& parameter() const { return parameter_; }
  const std::vector<T>& exp_avg() const { return exp_avg_; }
  const std::vector<T>& exp_avg_sq() const { return exp_avg_sq_; }
  // All zeros without amsgrad.
  const std::vector<T>& max_exp_avg_sq() const { return max_exp_avg_sq_; }

  // For tests that start from a given state.
  std::vector<T>* mutable_exp_avg() { return &exp_avg_; }
  std::vector<T>* mutable_exp_avg_sq() { return &exp_avg_sq_; }
  std::vector<T>* mutable_max_exp_avg_sq() { return &max_exp_avg_sq_; }
  void set_step_count(int64_t step_count) { step_count_ = step_count; }

 private:
  const OptimizerKind kind_;
  const bool amsgrad_;
  int64_t step_count_ = 0;
  std::vector<T> parameter_;
  std::vector<T> exp_avg_;
  std::vector<T> exp_avg_sq_;
  std::vector<T> max_exp_avg_sq_;
};

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_REFERENCE_ADAM_REFERENCE_H_
