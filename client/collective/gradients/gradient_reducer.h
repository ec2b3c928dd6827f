#ifndef OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_GRADIENT_REDUCER_H_
#define OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_GRADIENT_REDUCER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/collective/collective.h"
#include "proto/types/dtype.h"

namespace optstate::client {

// One gradient, the same on all ranks.
struct GradientSpec {
  uint64_t numel = 0;
  DType dtype = DType::kFloat32;
};

enum class ReductionOp : uint8_t {
  kSum = 1,
  kMean = 2,  // the sum over the number of ranks
};

// Gradients in one byte an element; see block_quantizer.h.
struct BlockQuantization {
  uint32_t block_elements = 256;  // that share a scale, of one gradient
};

// How gradients are put together, equal on all ranks.
struct ReducerOptions {
  // The type of what ranks send, and in which it is added up: float32 or
  // bfloat16.
  ElementType communication = ElementType::kFloat32;
  // Bytes of `communication` that are reduced together; a larger gradient is
  // cut. At least 4,096.
  uint64_t bucket_bytes = uint64_t{25} << 20;
  ReductionOp reduction = ReductionOp::kMean;
  // Gradients are divided by this before they are sent, and multiplied by it
  // afterwards: it keeps sums of many ranks within the range of bfloat16, and
  // changes the result by roundings alone. Finite, above 0.
  double predivide_factor = 1;
  // The result is multiplied by this. Finite, above 0.
  double postscale_factor = 1;
  // Sends one byte an element and keeps, in float32, what that leaves out. Only
  // with communication float32, in which the sums are made.
  std::optional<BlockQuantization> quantization;
};

// INVALID_ARGUMENT: options out of range, or that exclude each other.
absl::Status CheckReducerOptions(const ReducerOptions& options);

// Makes each gradient the sum or the mean of all ranks', in place, so that all
// ranks hand their daemons the same bits.
//
// Host memory: gradients are float32, bfloat16 or float16, such as those of
// Session::gradient(). A bucket is converted to the communication type, added
// up, and converted back, rounded to nearest even each time:
//
//   result = (sum over ranks of g / predivide) * predivide * postscale / W
//
// where W is the number of ranks for a mean, else 1; the factors are applied in
// double. An overflow is Inf, with which the daemon skips the step.
//
// Device memory (NCCL): gradients are added up where they lie, in their own
// dtype, which is the communication type; sums alone, since this process does
// not compute on a device. For a mean give the daemon W times the grad_scale.
//
// Quantised: ranks gather each other's bytes and add them up in the order of
// the ranks. A rank receives W - 1 bytes an element, where an all-reduce of
// float32 takes about 8: use it for up to 8 ranks. The error feedback belongs
// to a step that is taken: call NoteApplied() when it was, and a step that is
// skipped or taken again begins with the feedback of the step before.
//
// Threads: one at a time. Collective, in the same order on all ranks: Make()
// and Reduce().
class GradientReducer {
 public:
  // INVALID_ARGUMENT: options out of range, or more than 2^56 elements.
  // UNIMPLEMENTED: not on a device.
  // FAILED_PRECONDITION: ranks have other gradients or options; names the first
  // such rank. Other errors are the collective's, which outlives the reducer.
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Make(
      Collective* collective, std::vector<GradientSpec> gradients,
      const ReducerOptions& options);

  // Reduces gradients[i], numel contiguous elements of its dtype, for each
  // spec.
  //
  // `has_gradient`: null, or by gradient whether this rank has one. It becomes
  // whether some rank has one: a gradient that some ranks lack counts as 0
  // there, and all get the result; one that all lack is left as it is, because
  // no gradient means no update. On a device all ranks have all gradients.
  // DATA_LOSS: a rank has sent what no rank sends. After an error gradients are
  // not defined.
  absl::Status Reduce(absl::Span<const absl::Span<std::byte>> gradients,
                      std::vector<bool>* has_gradient = nullptr);

  // Says that the step of the last Reduce() was applied: its error feedback is
  // what the next one begins with. Does nothing when that Reduce() has failed,
  // and when it was said before.
  void NoteApplied();

  // The error feedback of a gradient, in units of g / predivide; empty without
  // quantisation.
  absl::Span<const float> feedback(size_t gradient) const;

 private:
  // Elements [begin, begin + count) of one gradient, which come at `offset` in
  // their bucket.
  struct Part {
    size_t gradient = 0;
    uint64_t begin = 0;
    uint64_t count = 0;
    uint64_t offset = 0;
  };

  GradientReducer(Collective* collective, std::vector<GradientSpec> gradients,
                  const ReducerOptions& options);

  std::string DescribeSettings() const;
  absl::Status CheckAlike();
  absl::Status CheckSpans(
      absl::Span<const absl::Span<std::byte>> gradients) const;
  absl::Status ReduceOnDevice(
      absl::Span<const absl::Span<std::byte>> gradients);
  // Makes `has_gradient` that of any rank.
  absl::Status ShareHasGradient(std::vector<bool>* has_gradient);
  // Adds a gradient's elements to the bucket, and reduces each full one.
  absl::Status AddToBucket(size_t gradient,
                           absl::Span<const absl::Span<std::byte>> gradients);
  absl::Status ReduceBucket(absl::Span<const absl::Span<std::byte>> gradients);
  // Fills packed_ with the bucket's gradients, predivided.
  void Pack(absl::Span<const absl::Span<std::byte>> gradients);
  absl::Status SumBucket();
  absl::Status SumQuantized();
  void Unpack(absl::Span<const absl::Span<std::byte>> gradients);

  Collective& collective_;
  const std::vector<GradientSpec> gradients_;
  const ReducerOptions options_;
  const uint64_t bucket_elements_;

  std::vector<bool> has_mine_;  // of the reduction under way
  std::vector<Part> bucket_;
  uint64_t bucket_size_ = 0;  // elements of bucket_
  std::vector<double> packed_;
  std::vector<float> sums_;
  std::vector<uint16_t> halves_;
  std::vector<std::byte> sent_, gathered_;
  // Error feedback of all gradients, one after the other, and where each
  // begins.
  std::vector<uint64_t> feedback_begin_;
  std::vector<float> feedback_, next_feedback_;
  bool has_next_feedback_ = false;  // of a reduction that has succeeded
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_GRADIENTS_GRADIENT_REDUCER_H_
