#ifndef OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_BLOCK_QUANTIZER_H_
#define OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_BLOCK_QUANTIZER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace optstate::client {

// Gradients in one byte an element, in blocks that share a scale.
//
// A block of values v with error feedback e from the step before becomes
//
//   scale  the largest |v + e|, over 127, rounded up to 16 significant bits
//   code   (v + e) / scale to nearest even, in [-127, 127]
//
// and code * scale is what is sent. A code has 7 bits, so the product is exact
// in float32. The new error feedback is v + e - code * scale, made in double
// and rounded to float32: of the first step it is exact, and later it is
// rounded once a step, in the last of its own 24 bits, where it is at most a
// 254th of the block's largest value. So what was sent in all steps, and the
// last feedback, add up to the gradients.
//
// A block with Inf or NaN is sent as NaN, so that the step is skipped; its
// feedback stays as it was. A block of zeros has scale 0.
//
// All of it is arithmetic of one element after the other: results depend on the
// values and the block size alone.

inline constexpr int kCodeMax = 127;

// The number of blocks, each of which has a scale.
constexpr size_t CountBlocks(size_t elements, size_t block_elements) {
  return (elements + block_elements - 1) / block_elements;
}

// Quantises `values` (v, in double: already predivided). `codes`, `feedback`
// and `next_feedback` have as many elements, `scales` one for each block.
// `next_feedback` may be `feedback`.
void QuantizeBlocks(absl::Span<const double> values, size_t block_elements,
                    absl::Span<const float> feedback,
                    absl::Span<float> next_feedback, absl::Span<float> scales,
                    absl::Span<int8_t> codes);

// Adds what was sent to `sums`, in float32. DATA_LOSS: no quantiser makes such
// scales and codes; `sums` are not defined then.
absl::Status AddBlocks(absl::Span<const float> scales,
                       absl::Span<const int8_t> codes, size_t block_elements,
                       absl::Span<float> sums);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_BLOCK_QUANTIZER_H_
