#include "client/collective/gradients/block_quantizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"

namespace optstate::client {
namespace {

// The bits of a float32 behind its 16 most significant ones.
constexpr uint32_t kLowBits = 0xFF;
// A block with this or more would overflow when its scale is rounded up; it
// counts as infinite.
constexpr double kLargestMax = 3.4e38;

// Returns `value` over 127, rounded up to 16 significant bits; a subnormal one
// to a multiple of 2^-141.
float ScaleOf(double largest) {
  auto scale = static_cast<float>(largest / kCodeMax);
  // The cast may have rounded down; codes are clamped, so that this is enough.
  if (scale == 0 && largest > 0) {
    scale = std::numeric_limits<float>::denorm_min();
  }
  const auto bits = absl::bit_cast<uint32_t>(scale);
  return absl::bit_cast<float>((bits + kLowBits) & ~kLowBits);
}

bool IsScale(float scale) {
  if (std::isnan(scale)) return true;
  const auto bits = absl::bit_cast<uint32_t>(scale);
  return !std::signbit(scale) && std::isfinite(scale) && (bits & kLowBits) == 0;
}

void SendNan(absl::Span<const float> feedback, absl::Span<float> next_feedback,
             float* scale, absl::Span<int8_t> codes) {
  *scale = std::numeric_limits<float>::quiet_NaN();
  std::fill(codes.begin(), codes.end(), int8_t{0});
  if (next_feedback.data() != feedback.data()) {
    std::copy(feedback.begin(), feedback.end(), next_feedback.begin());
  }
}

void QuantizeBlock(absl::Span<const double> values,
                   absl::Span<const float> feedback,
                   absl::Span<float> next_feedback, float* scale,
                   absl::Span<int8_t> codes) {
  double largest = 0;
  bool is_finite = true;
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i] + static_cast<double>(feedback[i]);
    // A comparison with NaN is false.
    is_finite &= std::abs(value) < kLargestMax;
    largest = std::max(largest, std::abs(value));
  }
  if (!is_finite) return SendNan(feedback, next_feedback, scale, codes);
  *scale = ScaleOf(largest);
  const auto unit = static_cast<double>(*scale);
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i] + static_cast<double>(feedback[i]);
    double code = unit == 0 ? 0 : std::nearbyint(value / unit);
    code = std::clamp(code, static_cast<double>(-kCodeMax),
                      static_cast<double>(kCodeMax));
    codes[i] = static_cast<int8_t>(code);
    next_feedback[i] = static_cast<float>(value - code * unit);
  }
}

}  // namespace

void QuantizeBlocks(absl::Span<const double> values, size_t block_elements,
                    absl::Span<const float> feedback,
                    absl::Span<float> next_feedback, absl::Span<float> scales,
                    absl::Span<int8_t> codes) {
  for (size_t block = 0; block < scales.size(); ++block) {
    const size_t begin = block * block_elements;
    QuantizeBlock(values.subspan(begin, block_elements),
                  feedback.subspan(begin, block_elements),
                  next_feedback.subspan(begin, block_elements), &scales[block],
                  codes.subspan(begin, block_elements));
  }
}

absl::Status AddBlocks(absl::Span<const float> scales,
                       absl::Span<const int8_t> codes, size_t block_elements,
                       absl::Span<float> sums) {
  for (size_t block = 0; block < scales.size(); ++block) {
    const float scale = scales[block];
    if (!IsScale(scale)) {
      return absl::DataLossError(
          absl::StrCat("block ", block, " has the scale ", scale));
    }
    const size_t begin = block * block_elements;
    const size_t end = std::min(codes.size(), begin + block_elements);
    for (size_t i = begin; i < end; ++i) {
      if (codes[i] < -kCodeMax) {
        return absl::DataLossError(absl::StrCat("element ", i, " has the code ",
                                                static_cast<int>(codes[i])));
      }
      sums[i] += static_cast<float>(codes[i]) * scale;
    }
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
