#ifndef OPTSTATE_KERNELS_ADAM_FACTORS_H_
#define OPTSTATE_KERNELS_ADAM_FACTORS_H_

#include "kernels/update_kernel.h"

namespace optstate {

// What each slot of UpdateFactors means to Adam and AdamW, on every device.
//
// With bc1 = 1 - beta1^t and bc2 = 1 - beta2^t:
enum AdamFactor : int {
  // Adam: weight_decay. AdamW: lr * weight_decay.
  kAdamDecay,
  // Of exp_avg and of exp_avg_sq: see factors.h.
  kAdamExpAvgWeight,
  kAdamSquareGain,
  kAdamSquareKeep,
  kAdamSquareLoss,
  // eps * sqrt(bc2), not 0 unless eps is.
  kAdamEps,
  // lr / bc1 * sqrt(bc2).
  kAdamStepSize,
};

// UpdateKernel::prepare of Adam (L2 decay) and AdamW (decoupled).
UpdateFactors PrepareAdam(const UpdateInput& input);
UpdateFactors PrepareAdamW(const UpdateInput& input);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_ADAM_FACTORS_H_
