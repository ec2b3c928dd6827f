#ifndef OPTSTATE_KERNELS_REFERENCE_WHOLE_REFERENCE_H_
#define OPTSTATE_KERNELS_REFERENCE_WHOLE_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {

// The optimizers that need the whole parameter, operation by operation as
// torch.optim's single-tensor forms write them (LAMB: as its paper), in the
// floating-point type T: the truth that kernels are measured against (double),
// and what torch itself would get (float). In float, sums and norms are those
// of an ideal torch: added in double, then rounded. Muon's Newton-Schulz
// steps are rounded to bfloat16 in float alone. Slow; for tests.
template <typename T>
class WholeReference {
 public:
  WholeReference(OptimizerKind kind, absl::Span<const int64_t> shape,
                 absl::Span<const T> parameter);

  // Takes one step; `gradient` is negated when maximize is set.
  void Step(const Hyperparams& hyperparams, absl::Span<const T> gradient);

  const std::vector<T>& parameter() const { return parameter_; }
  // State arrays are in the order of OptimizerInfo::state_arrays.
  const std::vector<T>& state(int k) const { return state_[k]; }

 private:
  void StepLamb(const Hyperparams& hyperparams, absl::Span<const T> gradient);
  void StepAdafactor(const Hyperparams& hyperparams,
                     absl::Span<const T> gradient);
  void StepMuon(const Hyperparams& hyperparams, absl::Span<const T> gradient);
  // Returns Adafactor's estimate of each element's variance.
  std::vector<T> FactoredVariance(absl::Span<const T> gradient, double weight,
                                  double eps);
  std::vector<T> VectorVariance(absl::Span<const T> gradient, double weight);

  const OptimizerKind kind_;
  const std::vector<int64_t> shape_;
  int64_t step_count_ = 0;
  std::vector<T> parameter_;
  std::vector<T> state_[kStateArraysMax];
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_REFERENCE_WHOLE_REFERENCE_H_
