#ifndef OPTSTATE_KERNELS_RULES_ADAM_FACTORS_H_
#define OPTSTATE_KERNELS_RULES_ADAM_FACTORS_H_

#include "kernels/update_kernel.h"

namespace optstate::kernels {

// The meaning of each slot of UpdateFactors to Adam and AdamW, on every device.
//
// With bc1 = 1 - beta1^t and bc2 = 1 - beta2^t:
enum AdamFactor : int {
  // For Adam weight_decay, for AdamW lr * weight_decay.
  kAdamDecay,
  // The factors of exp_avg and exp_avg_sq: see factors.h.
  kAdamExpAvgWeight,
  kAdamSquareGain,
  kAdamSquareKeep,
  kAdamSquareLoss,
  // The value eps * sqrt(bc2), not 0 unless eps is.
  kAdamEps,
  // The value lr / bc1 * sqrt(bc2).
  kAdamStepSize,
};

// Implements UpdateKernel::prepare of Adam (L2 decay) and AdamW (decoupled).
UpdateFactors PrepareAdam(const UpdateInput& input);
UpdateFactors PrepareAdamW(const UpdateInput& input);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_RULES_ADAM_FACTORS_H_
