#ifndef OPTSTATE_KERNELS_HYPERPARAMS_H_
#define OPTSTATE_KERNELS_HYPERPARAMS_H_

#include "absl/status/status.h"

namespace optstate {

// What the user may change at every step, per param group, in torch's names and
// in double, as the trainer holds them. Plain data: it travels in the commit
// message as it is.
struct Hyperparams {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  // Ascend instead of descend.
  bool maximize = false;
};

// INVALID_ARGUMENT, in torch.optim's words ("Invalid learning rate: -1"), for
// the first value that is NaN, infinite, negative or (betas) not in [0, 1).
absl::Status Validate(const Hyperparams& hyperparams);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_HYPERPARAMS_H_
