#include "kernels/power.h"

#include <cmath>

#include "kernels/factors.h"

namespace optstate::kernels {

double Log(double x) {
  // ln 2 in two parts; products of the first with an exponent are exact.
  constexpr double kLn2High = 0x1.62e42feep-1;
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  constexpr double kSqrtHalf = 0.70710678118654752440;
  int exponent = 0;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < kSqrtHalf) {
    mantissa *= 2;
    --exponent;
  }
  // The formula ln m = 2 artanh((m - 1) / (m + 1)) is an odd series in s, |s|
  // <= 0.172, so the terms after s^23 / 23 are below 2^-60 of the first term.
  // That one, added last, is nearly all of the sum.
  const double s = (mantissa - 1) / (mantissa + 1);
  const double square = s * s;
  double rest = 0;
  for (int k = 23; k >= 3; k -= 2) rest = square * (1.0 / k + rest);
  const double n = exponent;
  return n * kLn2High + (2 * s + (2 * s * rest + n * kLn2Low));
}

double Power(double base, double exponent) { return Exp(exponent * Log(base)); }

}  // namespace optstate::kernels
