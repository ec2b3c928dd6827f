#ifndef OPTSTATE_KERNELS_POWER_H_
#define OPTSTATE_KERNELS_POWER_H_

namespace optstate::kernels {

// These functions, like those of factors.h, use double arithmetic with IEEE
// operations alone.

// Returns the natural logarithm of a positive, finite number, within 2 units in
// the last place.
double Log(double x);

// Returns base^exponent of a positive, finite base; the relative error is below
// 1e-15 + 3e-16 * |exponent * Log(base)|.
double Power(double base, double exponent);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_POWER_H_
