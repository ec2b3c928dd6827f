#ifndef OPTSTATE_KERNELS_REDUCE_H_
#define OPTSTATE_KERNELS_REDUCE_H_

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/reduction.h"
#include "proto/types/dtype.h"

namespace optstate::kernels {

// Reduces the `numel` elements of the gradients' sum in float (in order, as an
// update kernel makes it; at least one gradient), in double, in one defined
// order: element i goes to accumulator i % 16, the accumulators are reduced
// pairwise (0 and 8, 1 and 9, ...; then 0 and 4, ...; 0 and 2, ...; 0 and 1).
// The result has equal bits on every instruction set. It is non-finite exactly
// when some element of the sum is NaN or infinite: neither the square of a
// finite float nor a sum of them can overflow a double.
double Reduce(Reduction reduction, DType dtype,
              absl::Span<const void* const> gradients, size_t numel);

inline double SumOfSquares(DType dtype, absl::Span<const void* const> gradients,
                           size_t numel) {
  return Reduce(Reduction::kSumOfSquares, dtype, gradients, numel);
}

inline double SumOfSquares(DType dtype, const void* gradient, size_t numel) {
  return SumOfSquares(dtype, absl::MakeConstSpan(&gradient, 1), numel);
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_REDUCE_H_
