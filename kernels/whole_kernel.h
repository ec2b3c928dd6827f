#ifndef OPTSTATE_KERNELS_WHOLE_KERNEL_H_
#define OPTSTATE_KERNELS_WHOLE_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate {

// One parameter as a whole, for optimizers whose update of an element needs all
// the others (norms, row sums, products of matrices). Old and new arrays do not
// overlap: compute() leaves the old ones as they are, so that a caller that is
// killed in it just calls it again. But a new_state[k] may be state[k] itself.
struct WholeView {
  absl::Span<const int64_t> shape;
  size_t numel = 0;  // the product of `shape`
  // Summed, unscaled, cut, and negated when maximize, by the caller.
  const float* gradient = nullptr;
  const float* master = nullptr;
  // In the order of OptimizerInfo::state_arrays, of as many elements as
  // StateElements() says; may be null where that is 0.
  const float* state[kStateArraysMax] = {};
  // Where the new values go; nothing else is written but `workspace`.
  float* new_master = nullptr;
  float* new_state[kStateArraysMax] = {};
  // Of WholeKernel::workspace_elements elements, aligned to 64 bytes. What is
  // in it before does not matter.
  float* workspace = nullptr;
};

// Obtained from FindWholeKernel; lives as long as the process.
//
// Threads: all functions are pure and may run concurrently on disjoint views.
// Bits: compute() gives equal bits on every instruction set, as UpdateKernel
// does, and NaN is always written as 0x7FC00000.
struct WholeKernel {
  // Bit k: state array k is never negative.
  uint32_t squares = 0;
  uint64_t (*workspace_elements)(absl::Span<const int64_t> shape) = nullptr;
  // INVALID_ARGUMENT, in torch's words, when the optimizer takes no parameter
  // of this shape.
  absl::Status (*check_shape)(absl::Span<const int64_t> shape) = nullptr;
  // `input` as for an UpdateKernel; its gradient_factor and gradient_limit are
  // the caller's business, as maximize is. The shape is one that passes
  // check_shape, the hyperparameters are Validate()'s.
  void (*compute)(const UpdateInput& input, const WholeView& view) = nullptr;
};

// Null when the optimizer is element-wise: then FindUpdateKernel has it. Picks
// the best instruction set of this CPU at the first call.
const WholeKernel* FindWholeKernel(OptimizerKind kind);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_WHOLE_KERNEL_H_
