#ifndef OPTSTATE_KERNELS_REDUCTION_ORDER_H_
#define OPTSTATE_KERNELS_REDUCTION_ORDER_H_

#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/ops/host_device.h"
#include "kernels/reduction.h"

namespace optstate::kernels {

// The order in which elements are reduced. A sum's last bits hang on it, so it
// is a definition: every instruction set and device repeats it.
//
//   element       the gradients' elements are added in float, in the order of
//                 the ranks (GradientElements), and the sum becomes a double
//   lanes         within one array, which is the part of a parameter in one
//                 tile, or a whole parameter, or a row of one, element i is
//                 taken into accumulator i % 16, in the order of i
//   accumulators  k and k + 8 are taken together, then k and k + 4, and so on:
//                 ResultOfAccumulators
//   tiles         the results of a parameter's tiles are added in order
//   parameters    their results are added in the order of the layout
//
// A short array needs no special case: an element of 0, behind the last one,
// changes no accumulator. Nor does it matter who computes an accumulator, a
// lane of a vector or a thread, or whether the square is fused with its
// addition: of a float it is exact in double.
inline constexpr size_t kReductionAccumulators = 16;

// Takes two accumulators together.
OPTSTATE_HOST_DEVICE inline double ReducedTogether(Reduction reduction,
                                                   double a, double b) {
  if (reduction != Reduction::kLargestAbsolute) return a + b;
  return b > a || std::isnan(b) ? b : a;
}

// Returns what all accumulators give, which it overwrites. NaN is one NaN,
// whatever the machine makes.
OPTSTATE_HOST_DEVICE inline double ResultOfAccumulators(Reduction reduction,
                                                        double* accumulators) {
  for (size_t half = kReductionAccumulators / 2; half > 0; half /= 2) {
    for (size_t k = 0; k < half; ++k) {
      accumulators[k] =
          ReducedTogether(reduction, accumulators[k], accumulators[k + half]);
    }
  }
  if (std::isnan(accumulators[0])) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return accumulators[0];
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_REDUCTION_ORDER_H_
