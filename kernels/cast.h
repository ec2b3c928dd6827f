#ifndef OPTSTATE_KERNELS_CAST_H_
#define OPTSTATE_KERNELS_CAST_H_

#include <cstddef>

#include "absl/types/span.h"
#include "proto/types/dtype.h"

namespace optstate::kernels {

struct UndoSlot;  // undo.h

// Sets out[i] = float(in[i]); exact. NaN stays NaN.
void CastToFloat(DType from, const void* in, float* out, size_t numel);

// Sets out[i] = in[i] rounded to nearest even, as the update kernels round
// their parameter output: denormals kept, overflow to infinity, NaN to the one
// quiet NaN of the format. To float32: a copy.
void CastFromFloat(DType to, const float* in, void* out, size_t numel);

// Accumulates gradients: with s[i] the in-order sum of the gradients' elements
// in float (as an update kernel makes it; at least one gradient), sum[i] = s[i]
// when `first`, else sum[i] = float(sum[i]) + s[i], rounded to nearest even.
// `sum_dtype` is float32 or `dtype`. A NaN that is computed, or rounded,
// becomes the one quiet NaN of the sum's format (0x7FC00000); one that is
// copied to float32 stays as it is. With `undo`, whose `saved` is 0 and for at
// most kTileElements, the old sums are kept there as an update kernel does.
// When `first` is set, `undo` is not touched: a process that finds the work
// half done repeats it from its beginning, as nothing that is read is
// overwritten.
void Accumulate(DType dtype, absl::Span<const void* const> gradients,
                bool first, DType sum_dtype, void* sum, size_t numel,
                UndoSlot* undo = nullptr);

inline void Accumulate(DType dtype, absl::Span<const void* const> gradients,
                       bool first, float* sum, size_t numel,
                       UndoSlot* undo = nullptr) {
  Accumulate(dtype, gradients, first, DType::kFloat32, sum, numel, undo);
}

inline void Accumulate(DType dtype, const void* gradient, bool first,
                       float* sum, size_t numel, UndoSlot* undo = nullptr) {
  Accumulate(dtype, absl::MakeConstSpan(&gradient, 1), first, sum, numel, undo);
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_CAST_H_
