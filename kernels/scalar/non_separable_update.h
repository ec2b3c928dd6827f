#ifndef OPTSTATE_KERNELS_SCALAR_NON_SEPARABLE_UPDATE_H_
#define OPTSTATE_KERNELS_SCALAR_NON_SEPARABLE_UPDATE_H_

#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::scalar {

// Computes what WholeKernel::compute of LAMB and of Adafactor does, with equal
// bits, an element at a time. Slow, for tests; needs no workspace. Returns
// false, and does nothing, for other optimizers.
bool ComputeWhole(OptimizerKind kind, const UpdateInput& input,
                  const WholeView& view);

// Computes what Muon's kernel does with ns_steps 0, for a parameter that has no
// more rows than columns: all of it but the products of matrices.
void ComputeMuonWithoutSteps(const UpdateInput& input, const WholeView& view);

}  // namespace optstate::kernels::scalar

#endif  // OPTSTATE_KERNELS_SCALAR_NON_SEPARABLE_UPDATE_H_
