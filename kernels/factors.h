#ifndef OPTSTATE_KERNELS_FACTORS_H_
#define OPTSTATE_KERNELS_FACTORS_H_

#include <cstdint>
#include <limits>

#include "kernels/ops/host_device.h"
#include "kernels/update_kernel.h"

namespace optstate::kernels {

// The building blocks of UpdateKernel::prepare of every rule: double arithmetic
// with IEEE operations alone, so that every machine gets equal bits. (The C
// library's pow and exp pick their variant by CPU, and those differ in the last
// bit.)

// Returns base^exponent by squaring.
double IntegerPower(double base, int64_t exponent);

// Returns e^x, within 2 units in the last place; NaN stays NaN.
double Exp(double x);

// Rounds to float. A value too large for a float becomes the largest float, not
// infinity, so that zero times a factor stays zero.
OPTSTATE_HOST_DEVICE inline float RoundToFloat(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  // Comparisons with NaN, which stays NaN, are false.
  if (value < -kLargest) value = -kLargest;
  if (value > kLargest) value = kLargest;
  return static_cast<float>(value);
}

// RoundToFloat() for a factor that must not vanish: not 0 unless `value` is.
float RoundToFloatNotZero(double value);

// Returns the factors that are common to all rules; slots are 0.
UpdateFactors CommonFactors(const UpdateInput& input, bool maximize);

// An exponential moving average with decay `beta` counts from its old value
// when 1 - beta is below 1/2, else from what is new: either form would cancel
// on the other side.
//
// torch.lerp's weight: 1 - beta, or -beta, never positive, when the average
// counts from what is new.
float AverageWeight(double beta);
// The factors of an average of squares: it gains `Gain` of the square, keeps
// `Keep` of itself and loses `Loss`: 1 - beta, 1 and 1 - beta, or 1 - beta,
// beta and 0.
float AverageGain(double beta);
float AverageKeep(double beta);
float AverageLoss(double beta);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_FACTORS_H_
