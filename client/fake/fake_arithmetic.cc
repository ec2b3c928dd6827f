#include "client/fake/fake_arithmetic.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace optstate::client {
namespace {

// The float16 format: 10 explicit fraction bits, exponents from -14 to 15.
constexpr int kHalfFractionBits = 10;
constexpr int kHalfExponentMin = -14;
constexpr float kHalfMax = 65504;

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint16_t ToBFloat16(float value) {
  const uint32_t bits = BitsOf(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t ToHalf(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), kHalfExponentMin);
  // The magnitude in units of the last place; rounds to even by default.
  const double units =
      std::nearbyint(std::ldexp(magnitude, kHalfFractionBits - exponent));
  if (std::ldexp(units, exponent - kHalfFractionBits) > kHalfMax) {
    return sign | 0x7c00;
  }
  // A carry out of the fraction correctly goes into the exponent.
  const int biased = (exponent - kHalfExponentMin) << kHalfFractionBits;
  return static_cast<uint16_t>(sign | (biased + static_cast<int>(units)));
}

float FromHalf(uint16_t bits) {
  const int biased = bits >> kHalfFractionBits & 0x1f;
  const int fraction = bits & 0x3ff;
  double magnitude;
  if (biased == 0x1f) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else {
    const int units = biased == 0 ? fraction : fraction + 0x400;
    magnitude = std::ldexp(
        units, std::max(biased, 1) - 1 + kHalfExponentMin - kHalfFractionBits);
  }
  return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
}

double Power(double base, int64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent /= 2, base *= base) {
    if (exponent % 2 == 1) power *= base;
  }
  return power;
}

// Interpolates as torch.lerp does: from the nearer end.
float Lerp(float start, float end, double weight) {
  const float difference = end - start;
  return weight < 0.5 ? start + static_cast<float>(weight) * difference
                      : end + static_cast<float>(weight - 1) * difference;
}

// Keeps beta2 of the old value; the form loses no precision when beta2 is near
// 1.
float NextSquare(float square, float grad, double beta2) {
  const float gain = static_cast<float>(1 - beta2) * grad * grad;
  if (1 - beta2 < 0.5) {
    return square + (gain - static_cast<float>(1 - beta2) * square);
  }
  return static_cast<float>(beta2) * square + gain;
}

}  // namespace

float LoadElement(DType dtype, const std::byte* data, uint64_t index) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, data + index * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + index * sizeof(bits), sizeof(bits));
  return dtype == DType::kFloat16 ? FromHalf(bits)
                                  : FromBits(uint32_t{bits} << 16);
}

void StoreElement(DType dtype, std::byte* data, uint64_t index, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(data + index * sizeof(value), &value, sizeof(value));
    return;
  }
  const uint16_t bits =
      dtype == DType::kFloat16 ? ToHalf(value) : ToBFloat16(value);
  std::memcpy(data + index * sizeof(bits), &bits, sizeof(bits));
}

void FakeUpdate(OptimizerKind optimizer, bool amsgrad,
                const Hyperparams& hyperparams, double gradient_factor,
                const std::vector<float>& gradient, FakeState* state) {
  const int64_t t = ++state->step_count;
  const bool decoupled = optimizer == OptimizerKind::kAdamW;
  const double correction2_sqrt =
      std::sqrt(1 - Power(hyperparams[adam::kBeta2], t));
  const float factor = static_cast<float>(
      hyperparams[adam::kMaximize] != 0 ? -gradient_factor : gradient_factor);
  const float decay = static_cast<float>(
      decoupled ? hyperparams[adam::kLr] * hyperparams[adam::kWeightDecay]
                : hyperparams[adam::kWeightDecay]);
  const float eps =
      static_cast<float>(hyperparams[adam::kEps] * correction2_sqrt);
  const float step_size = static_cast<float>(
      hyperparams[adam::kLr] / (1 - Power(hyperparams[adam::kBeta1], t)) *
      correction2_sqrt);
  for (size_t i = 0; i < gradient.size(); ++i) {
    float& master = state->master[i];
    float grad = gradient[i] * factor;
    if (!decoupled && decay != 0) grad += decay * master;
    state->exp_avg[i] =
        Lerp(state->exp_avg[i], grad, 1 - hyperparams[adam::kBeta1]);
    state->exp_avg_sq[i] =
        NextSquare(state->exp_avg_sq[i], grad, hyperparams[adam::kBeta2]);
    float square = state->exp_avg_sq[i];
    if (amsgrad) {
      square = std::max(state->max_exp_avg_sq[i], square);
      state->max_exp_avg_sq[i] = square;
    }
    float change = step_size * state->exp_avg[i] / (std::sqrt(square) + eps);
    if (decoupled) change = decay * master + change;
    master -= change;
  }
}

}  // namespace optstate::client
