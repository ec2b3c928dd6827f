#ifndef OPTSTATE_KERNELS_WHOLE_SHAPE_H_
#define OPTSTATE_KERNELS_WHOLE_SHAPE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace optstate::kernels {

// Shape functions that several WholeKernels have in common.

// Returns the product of the dimensions, none of which is negative.
inline uint64_t NumelOf(absl::Span<const int64_t> shape) {
  uint64_t numel = 1;
  for (int64_t size : shape) numel *= static_cast<uint64_t>(size);
  return numel;
}

// WholeKernel::check_shape of an optimizer that takes all shapes.
inline absl::Status AnyShape(absl::Span<const int64_t>) {
  return absl::OkStatus();
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_WHOLE_SHAPE_H_
