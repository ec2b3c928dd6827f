#include "kernels/factors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/random_bits.h"

namespace optstate::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLargest = std::numeric_limits<float>::max();

bool CountsFromOld(double beta) { return std::abs(1 - beta) < 0.5; }

}  // namespace

double IntegerPower(double base, int64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) power *= base;
    base *= base;
  }
  return power;
}

double Exp(double x) {
  if (std::isnan(x)) return x;
  // Beyond these the result is infinite, or 0.
  x = std::clamp(x, -800.0, 800.0);
  constexpr double kInverseLn2 = 1.44269504088896340736;
  // ln 2 in two parts; products of the first with a small integer are exact.
  constexpr double kLn2High = 0x1.62e42feep-1;
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  const double n = std::floor(x * kInverseLn2 + 0.5);
  const double rest = (x - n * kLn2High) - n * kLn2Low;
  // The sum is Taylor's series: |rest| <= ln(2) / 2, so the tail is below
  // 2^-57.
  double sum = 1;
  for (int k = 13; k >= 1; --k) sum = 1 + rest * sum / k;
  return std::ldexp(sum, static_cast<int>(n));
}

float RoundToFloatNotZero(double value) {
  const float rounded = RoundToFloat(value);
  if (value <= 0) return rounded;
  return std::max(rounded, std::numeric_limits<float>::denorm_min());
}

UpdateFactors CommonFactors(const UpdateInput& input, bool maximize) {
  UpdateFactors factors;
  const double factor =
      maximize ? -input.gradient_factor : input.gradient_factor;
  // An infinite factor is how the caller says that gradients are non-finite.
  factors.gradient_factor =
      std::isinf(factor) ? static_cast<float>(factor) : RoundToFloat(factor);
  const double limit = input.gradient_limit;
  factors.gradient_limit =
      limit > 0 && limit <= kLargest ? RoundToFloatNotZero(limit) : kInfinity;
  factors.random_seed = static_cast<uint32_t>(Mix(input.step));
  return factors;
}

float AverageWeight(double beta) {
  return RoundToFloat(CountsFromOld(beta) ? 1 - beta : -beta);
}

float AverageGain(double beta) { return RoundToFloat(1 - beta); }

float AverageKeep(double beta) {
  return RoundToFloat(CountsFromOld(beta) ? 1 : beta);
}

float AverageLoss(double beta) {
  return RoundToFloat(CountsFromOld(beta) ? 1 - beta : 0);
}

}  // namespace optstate::kernels
