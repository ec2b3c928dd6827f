#ifndef OPTSTATE_KERNELS_MASTER_FORMAT_H_
#define OPTSTATE_KERNELS_MASTER_FORMAT_H_

#include <cstddef>

#include "proto/types/dtype.h"

namespace optstate::kernels {

// Conversions of masters of any format to and from float, for reading, saving
// and loading them. `parameter` and `master` are as in TileView; only what the
// format names is touched.

// Sets out[i] to the master of element i; exact.
void MasterToFloat(MasterFormat format, const void* parameter,
                   const void* master, float* out, size_t numel);

// Sets masters and the parameters (of `dtype`) that belong to them. kSplit: NaN
// becomes 0x7FC00000.
void MasterFromFloat(MasterFormat format, DType dtype, const float* in,
                     void* parameter, void* master, size_t numel);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_MASTER_FORMAT_H_
