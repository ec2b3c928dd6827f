#ifndef OPTSTATE_KERNELS_WHOLE_KERNEL_H_
#define OPTSTATE_KERNELS_WHOLE_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {

// One parameter as a whole, for optimizers whose update of an element needs all
// the others (norms, row sums, products of matrices). Old and new arrays do not
// overlap: compute() leaves the old ones unchanged, so that a caller that is
// killed inside compute() calls it again. But a new_state[k] may be state[k]
// itself.
struct WholeView {
  absl::Span<const int64_t> shape;
  size_t numel = 0;  // the product of `shape`
  // The gradient, which the caller has summed, unscaled, cut, and negated when
  // maximize is set.
  const float* gradient = nullptr;
  const float* master = nullptr;
  // The arrays are in the order of OptimizerInfo::state_arrays, of as many
  // elements as StateElements() says; an array may be null where that is 0.
  const float* state[kStateArraysMax] = {};
  // The new values go here; nothing else is written but `workspace`.
  float* new_master = nullptr;
  float* new_state[kStateArraysMax] = {};
  // The workspace has WholeKernel::workspace_elements elements, aligned to 64
  // bytes. Its previous contents do not matter.
  float* workspace = nullptr;
};

// The kernel of one optimizer, obtained from FindWholeKernel; lives as long as
// the process.
//
// Threads: all functions are pure and may run concurrently on disjoint views.
// Bits: compute() gives equal bits on every instruction set, as UpdateKernel
// does, and NaN is always written as 0x7FC00000.
struct WholeKernel {
  uint64_t (*workspace_elements)(absl::Span<const int64_t> shape) = nullptr;
  // Returns INVALID_ARGUMENT, in torch's words, when the optimizer takes no
  // parameter of this shape.
  absl::Status (*check_shape)(absl::Span<const int64_t> shape) = nullptr;
  // Takes `input` as an UpdateKernel does; gradient_factor and gradient_limit
  // are the caller's business, as maximize is. The shape has passed
  // check_shape, the hyperparameters have passed Validate().
  void (*compute)(const UpdateInput& input, const WholeView& view) = nullptr;
};

// Returns null when the optimizer is element-wise: FindUpdateKernel then has
// the kernel. Picks the best instruction set of this CPU at the first call.
const WholeKernel* FindWholeKernel(OptimizerKind kind);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_WHOLE_KERNEL_H_
