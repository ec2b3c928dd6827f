#ifndef OPTSTATE_KERNELS_ADAM_FACTORS_H_
#define OPTSTATE_KERNELS_ADAM_FACTORS_H_

#include <cstdint>

#include "kernels/hyperparams.h"
#include "kernels/update_kernel.h"

namespace optstate {

// What each slot of UpdateFactors means to Adam and AdamW, on every device. A
// value too large for a float becomes the largest float, not infinity, so that
// zero times a factor stays zero; only an infinite gradient_factor stays so.
//
// With bc1 = 1 - beta1^t and bc2 = 1 - beta2^t:
enum AdamFactor : int {
  // gradient_factor, negated when maximize.
  kAdamGradientFactor,
  // Adam: weight_decay. AdamW: lr * weight_decay.
  kAdamDecay,
  // torch.lerp's weight: 1 - beta1 when that is below 1/2 (the new exp_avg
  // counts from the old one), else -beta1, never positive (it counts from the
  // gradient).
  kAdamExpAvgWeight,
  // 1 - beta2: the gain of the squared gradient.
  kAdamSquareGain,
  // The same choice for exp_avg_sq: it keeps `Keep` of itself and loses `Loss`:
  // 1 and 1 - beta2 when 1 - beta2 is below 1/2, else beta2 and 0.
  kAdamSquareKeep,
  kAdamSquareLoss,
  // eps * sqrt(bc2), not 0 unless eps is.
  kAdamEps,
  // lr / bc1 * sqrt(bc2).
  kAdamStepSize,
};

// UpdateKernel::prepare of Adam (L2 decay) and AdamW (decoupled). Computed in
// double with IEEE operations alone, so that every machine gets equal bits.
UpdateFactors PrepareAdam(const Hyperparams& hyperparams, int64_t step_count,
                          double gradient_factor);
UpdateFactors PrepareAdamW(const Hyperparams& hyperparams, int64_t step_count,
                           double gradient_factor);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_ADAM_FACTORS_H_
