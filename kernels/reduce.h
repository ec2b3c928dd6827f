#ifndef OPTSTATE_KERNELS_REDUCE_H_
#define OPTSTATE_KERNELS_REDUCE_H_

#include <cstddef>

#include "proto/types/dtype.h"

namespace optstate {

// Sum of the squares of `numel` gradient elements in double, in one defined
// order: element i goes to accumulator i % 16, the accumulators are summed
// pairwise (0+8, 1+9, ...; then 0+4, ...; 0+2, ...; 0+1). Equal bits on every
// instruction set.
// Not finite exactly when some element is NaN or infinite: the square of a
// finite float cannot overflow a double.
double SumOfSquares(DType dtype, const void* gradient, size_t numel);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_REDUCE_H_
