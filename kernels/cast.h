#ifndef OPTSTATE_KERNELS_CAST_H_
#define OPTSTATE_KERNELS_CAST_H_

#include <cstddef>

#include "proto/types/dtype.h"

namespace optstate {

// out[i] = float(in[i]); exact. NaN stays NaN.
void CastToFloat(DType from, const void* in, float* out, size_t numel);

// out[i] = in[i] rounded to nearest even; denormals kept, overflow to infinity,
// NaN to a quiet NaN. The same rounding as the update kernels' parameter
// output.
void CastFromFloat(DType to, const float* in, void* out, size_t numel);

// Gradient accumulation: sum[i] = float(gradient[i]) when `first`, else
// sum[i] += float(gradient[i]), in fp32.
void Accumulate(DType dtype, const void* gradient, bool first, float* sum,
                size_t numel);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_CAST_H_
