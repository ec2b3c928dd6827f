#include "kernels/whole_kernel.h"

#include "kernels/cpu/targets.h"
#include "kernels/cpu/whole_rules.h"

namespace optstate::kernels {

const WholeKernel* FindWholeKernel(OptimizerKind kind) {
  return cpu::FindWholeKernel(kind, cpu::BestTarget());
}

}  // namespace optstate::kernels
