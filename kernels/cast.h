#ifndef OPTSTATE_KERNELS_CAST_H_
#define OPTSTATE_KERNELS_CAST_H_

#include <cstddef>

#include "proto/types/dtype.h"

namespace optstate {

struct UndoSlot;  // undo.h

// out[i] = float(in[i]); exact. NaN stays NaN.
void CastToFloat(DType from, const void* in, float* out, size_t numel);

// out[i] = in[i] rounded to nearest even, as the update kernels round their
// parameter output: denormals kept, overflow to infinity, NaN to the one quiet
// NaN of the format. To float32: a copy.
void CastFromFloat(DType to, const float* in, void* out, size_t numel);

// Gradient accumulation: sum[i] = float(gradient[i]) when `first`, else
// sum[i] += float(gradient[i]), in fp32, where NaN becomes 0x7FC00000.
// With `undo`, whose `saved` is 0 and for at most kTileElements, the old sums
// are kept there as an update kernel does. When `first` it is not touched: a
// process that finds the work half done does it again from its beginning, as
// nothing that is read is overwritten.
void Accumulate(DType dtype, const void* gradient, bool first, float* sum,
                size_t numel, UndoSlot* undo = nullptr);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_CAST_H_
