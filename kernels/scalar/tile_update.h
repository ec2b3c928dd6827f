#ifndef OPTSTATE_KERNELS_SCALAR_TILE_UPDATE_H_
#define OPTSTATE_KERNELS_SCALAR_TILE_UPDATE_H_

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/reduction.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

namespace optstate::kernels::scalar {

// Updates the view as UpdateKernel::apply of the kernel of `key`, with equal
// bits, but for its undo: an element at a time, as a CUDA thread does. Slow,
// for tests. Returns false, and does nothing, when the optimizer has no such
// kernel.
bool UpdateTile(const UpdateKernelKey& key, const UpdateFactors& factors,
                const TileView& view);

// Reduces as Reduce of reduce.h does, with equal bits, an element at a time.
double ReduceElements(Reduction reduction, DType dtype,
                      absl::Span<const void* const> gradients, size_t numel);

}  // namespace optstate::kernels::scalar

#endif  // OPTSTATE_KERNELS_SCALAR_TILE_UPDATE_H_
