#include "client/collective/gradients/gradient_reducer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/collective/gather.h"
#include "client/collective/gradients/block_quantizer.h"
#include "client/collective/gradients/gradient_elements.h"
#include "client/collective/half_floats.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr uint64_t kBucketBytesMin = 4096;
constexpr uint32_t kBlockElementsMin = 16;
constexpr uint32_t kBlockElementsMax = 1u << 20;
constexpr size_t kBitsPerByte = 8;
// All gradients together: their bytes are far from overflowing 64 bits.
constexpr uint64_t kElementsMax = uint64_t{1} << 56;

bool IsFactor(double value) { return std::isfinite(value) && value > 0; }

absl::Status CheckSizes(absl::Span<const GradientSpec> gradients) {
  uint64_t all = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].numel > kElementsMax - all) {
      return absl::InvalidArgumentError(absl::StrCat(
          "gradient ", i, " has ", gradients[i].numel, " elements, after ", all,
          " of those before it: the limit is ", kElementsMax, " in all"));
    }
    all += gradients[i].numel;
  }
  return absl::OkStatus();
}

absl::Status CheckForDevice(absl::Span<const GradientSpec> gradients,
                            const ReducerOptions& options) {
  if (options.reduction != ReductionOp::kSum || options.predivide_factor != 1 ||
      options.postscale_factor != 1 || options.quantization.has_value()) {
    return absl::UnimplementedError(
        "gradients on a device are added up, and nothing else is done with "
        "them here: take ReductionOp::kSum without factors or quantisation, "
        "and commit with world_size times the grad_scale for a mean");
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    const DType dtype = gradients[i].dtype;
    const bool is_same = options.communication == ElementType::kFloat32
                             ? dtype == DType::kFloat32
                             : dtype == DType::kBFloat16;
    if (is_same) continue;
    return absl::UnimplementedError(absl::StrCat(
        "gradient ", i, " is ", Name(dtype), " and communication ",
        Name(options.communication),
        ": gradients on a device are added up in their own dtype, float32 or "
        "bfloat16"));
  }
  return absl::OkStatus();
}

template <typename Number>
absl::Span<std::byte> AsBytes(std::vector<Number>& numbers, uint64_t count) {
  return absl::MakeSpan(reinterpret_cast<std::byte*>(numbers.data()),
                        count * sizeof(Number));
}

}  // namespace

absl::Status CheckReducerOptions(const ReducerOptions& options) {
  if (options.communication != ElementType::kFloat32 &&
      options.communication != ElementType::kBFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("communication is float32 or bfloat16, not ",
                     Name(options.communication)));
  }
  if (options.bucket_bytes < kBucketBytesMin) {
    return absl::InvalidArgumentError(absl::StrCat("bucket_bytes is at least ",
                                                   kBucketBytesMin, ", not ",
                                                   options.bucket_bytes));
  }
  if (options.reduction != ReductionOp::kSum &&
      options.reduction != ReductionOp::kMean) {
    return absl::InvalidArgumentError("reduction is neither kSum nor kMean");
  }
  if (!IsFactor(options.predivide_factor) ||
      !IsFactor(options.postscale_factor) ||
      !IsFactor(options.predivide_factor * options.postscale_factor)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "predivide_factor, postscale_factor and their product are finite and "
        "above 0, not ",
        options.predivide_factor, " and ", options.postscale_factor));
  }
  if (!options.quantization.has_value()) return absl::OkStatus();
  const uint32_t block = options.quantization->block_elements;
  if (block < kBlockElementsMin || block > kBlockElementsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_elements is from ", kBlockElementsMin, " to ",
                     kBlockElementsMax, ", not ", block));
  }
  if (options.communication != ElementType::kFloat32) {
    return absl::InvalidArgumentError(
        "quantised gradients are added up in float32: leave communication out");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GradientReducer>> GradientReducer::Make(
    Collective* collective, std::vector<GradientSpec> gradients,
    const ReducerOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(CheckReducerOptions(options));
  OPTSTATE_RETURN_IF_ERROR(CheckSizes(gradients));
  const bool is_on_device = collective->memory() == MemoryKind::kDevice;
  if (is_on_device) {
    OPTSTATE_RETURN_IF_ERROR(CheckForDevice(gradients, options));
  }
  std::unique_ptr<GradientReducer> reducer(
      new GradientReducer(collective, std::move(gradients), options));
  // On a device this process has no memory for the question.
  if (!is_on_device) OPTSTATE_RETURN_IF_ERROR(reducer->CheckAlike());
  return reducer;
}

GradientReducer::GradientReducer(Collective* collective,
                                 std::vector<GradientSpec> gradients,
                                 const ReducerOptions& options)
    : collective_(*collective),
      gradients_(std::move(gradients)),
      options_(options),
      bucket_elements_(options.bucket_bytes /
                       SizeInBytes(options.communication)) {
  if (!options_.quantization.has_value()) return;
  uint64_t all = 0;
  for (const GradientSpec& each : gradients_) {
    feedback_begin_.push_back(all);
    all += each.numel;
  }
  feedback_.resize(all);
  next_feedback_.resize(all);
}

std::string GradientReducer::DescribeSettings() const {
  std::string text = absl::StrCat(
      "communication ", Name(options_.communication), ", bucket_bytes ",
      options_.bucket_bytes, ", reduction ",
      options_.reduction == ReductionOp::kSum ? "sum" : "mean",
      absl::StrFormat(", predivide_factor %.17g, postscale_factor %.17g",
                      options_.predivide_factor, options_.postscale_factor),
      ", block_elements ",
      options_.quantization.has_value() ? options_.quantization->block_elements
                                        : 0,
      "; ", gradients_.size(), " gradients");
  for (const GradientSpec& each : gradients_) {
    absl::StrAppend(&text, ", ", each.numel, " ", Name(each.dtype));
  }
  return text;
}

absl::Status GradientReducer::CheckAlike() {
  const std::string mine = DescribeSettings();
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<Unlike> unlike,
                            FindUnlike(collective_, mine));
  if (!unlike.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks reduce other gradients or with other options. Rank 0: ...",
      unlike->of_first, "; rank ", unlike->rank, ": ...", unlike->of_other));
}

absl::Status GradientReducer::CheckSpans(
    absl::Span<const absl::Span<std::byte>> gradients) const {
  if (gradients.size() != gradients_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(gradients.size(), " gradients, the reducer was made for ",
                     gradients_.size()));
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    const uint64_t bytes =
        gradients_[i].numel * SizeInBytes(gradients_[i].dtype);
    if (gradients[i].size() == bytes) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("gradient ", i, " has ", gradients[i].size(),
                     " bytes, and ", gradients_[i].numel, " elements of ",
                     Name(gradients_[i].dtype), " have ", bytes));
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::Reduce(
    absl::Span<const absl::Span<std::byte>> gradients,
    std::vector<bool>* has_gradient) {
  has_next_feedback_ = false;
  OPTSTATE_RETURN_IF_ERROR(CheckSpans(gradients));
  has_mine_.assign(gradients_.size(), true);
  if (has_gradient != nullptr) {
    if (has_gradient->size() != gradients_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("has_gradient is of ", has_gradient->size(),
                       " gradients, the reducer of ", gradients_.size()));
    }
    has_mine_ = *has_gradient;
  }
  if (collective_.memory() == MemoryKind::kDevice) {
    return ReduceOnDevice(gradients);
  }
  std::vector<bool> has_any = has_mine_;
  OPTSTATE_RETURN_IF_ERROR(ShareHasGradient(&has_any));
  next_feedback_ = feedback_;
  bucket_.clear();
  bucket_size_ = 0;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (has_any[i]) OPTSTATE_RETURN_IF_ERROR(AddToBucket(i, gradients));
  }
  if (bucket_size_ > 0) OPTSTATE_RETURN_IF_ERROR(ReduceBucket(gradients));
  has_next_feedback_ = true;
  if (has_gradient != nullptr) *has_gradient = has_any;
  return absl::OkStatus();
}

absl::Status GradientReducer::ReduceOnDevice(
    absl::Span<const absl::Span<std::byte>> gradients) {
  if (std::find(has_mine_.begin(), has_mine_.end(), false) != has_mine_.end()) {
    return absl::UnimplementedError(
        "a rank lacks a gradient, and ranks on devices do not tell each other: "
        "give all ranks all gradients, with zeros where there is none");
  }
  std::vector<SumBuffers> buffers;
  buffers.reserve(gradients.size());
  for (const absl::Span<std::byte> each : gradients) {
    buffers.push_back({.in = each, .out = each});
  }
  return collective_.AllReduceEach(options_.communication, buffers);
}

// A rank that has all gradients takes part too: it cannot know that others do.
absl::Status GradientReducer::ShareHasGradient(
    std::vector<bool>* has_gradient) {
  const size_t bytes = (has_gradient->size() + kBitsPerByte - 1) / kBitsPerByte;
  std::vector<std::byte> mine(bytes);
  for (size_t i = 0; i < has_gradient->size(); ++i) {
    if (!(*has_gradient)[i]) continue;
    mine[i / kBitsPerByte] |= std::byte{1} << (i % kBitsPerByte);
  }
  std::vector<std::byte> all(bytes * collective_.world_size());
  OPTSTATE_RETURN_IF_ERROR(collective_.AllGather(mine, absl::MakeSpan(all)));
  for (size_t i = 0; i < has_gradient->size(); ++i) {
    std::byte any{0};
    for (uint32_t rank = 0; rank < collective_.world_size(); ++rank) {
      any |= all[rank * bytes + i / kBitsPerByte];
    }
    (*has_gradient)[i] =
        (any >> (i % kBitsPerByte) & std::byte{1}) != std::byte{0};
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::AddToBucket(
    size_t gradient, absl::Span<const absl::Span<std::byte>> gradients) {
  const uint64_t numel = gradients_[gradient].numel;
  for (uint64_t begin = 0; begin < numel;) {
    const uint64_t count =
        std::min(numel - begin, bucket_elements_ - bucket_size_);
    bucket_.push_back({.gradient = gradient,
                       .begin = begin,
                       .count = count,
                       .offset = bucket_size_});
    bucket_size_ += count;
    begin += count;
    if (bucket_size_ < bucket_elements_) continue;
    OPTSTATE_RETURN_IF_ERROR(ReduceBucket(gradients));
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::ReduceBucket(
    absl::Span<const absl::Span<std::byte>> gradients) {
  packed_.resize(std::max<size_t>(packed_.size(), bucket_size_));
  sums_.resize(std::max<size_t>(sums_.size(), bucket_size_));
  Pack(gradients);
  OPTSTATE_RETURN_IF_ERROR(options_.quantization.has_value() ? SumQuantized()
                                                             : SumBucket());
  Unpack(gradients);
  bucket_.clear();
  bucket_size_ = 0;
  return absl::OkStatus();
}

void GradientReducer::Pack(absl::Span<const absl::Span<std::byte>> gradients) {
  for (const Part& part : bucket_) {
    double* const to = packed_.data() + part.offset;
    if (!has_mine_[part.gradient]) {
      std::fill_n(to, part.count, 0.0);
      continue;
    }
    const DType dtype = gradients_[part.gradient].dtype;
    const std::byte* const from = gradients[part.gradient].data();
    for (uint64_t i = 0; i < part.count; ++i) {
      to[i] = static_cast<double>(LoadGradient(dtype, from, part.begin + i)) /
              options_.predivide_factor;
    }
  }
}

absl::Status GradientReducer::SumBucket() {
  for (uint64_t i = 0; i < bucket_size_; ++i) {
    sums_[i] = static_cast<float>(packed_[i]);
  }
  if (options_.communication == ElementType::kFloat32) {
    const absl::Span<std::byte> bytes = AsBytes(sums_, bucket_size_);
    return collective_.AllReduce(ElementType::kFloat32, bytes, bytes);
  }
  halves_.resize(std::max<size_t>(halves_.size(), bucket_size_));
  for (uint64_t i = 0; i < bucket_size_; ++i) {
    halves_[i] = BFloat16FromFloat(sums_[i]);
  }
  const absl::Span<std::byte> bytes = AsBytes(halves_, bucket_size_);
  OPTSTATE_RETURN_IF_ERROR(
      collective_.AllReduce(ElementType::kBFloat16, bytes, bytes));
  for (uint64_t i = 0; i < bucket_size_; ++i) {
    sums_[i] = FloatFromBFloat16(halves_[i]);
  }
  return absl::OkStatus();
}

// A rank's bytes are the scales of all parts, then the codes of all parts.
absl::Status GradientReducer::SumQuantized() {
  const size_t block = options_.quantization->block_elements;
  size_t blocks = 0;
  for (const Part& part : bucket_) blocks += CountBlocks(part.count, block);
  const size_t scale_bytes = blocks * sizeof(float);
  const size_t rank_bytes = scale_bytes + bucket_size_;
  // Each rank's scales begin at a whole float.
  const size_t stride =
      (rank_bytes + sizeof(float) - 1) / sizeof(float) * sizeof(float);
  sent_.assign(stride, std::byte{0});
  gathered_.resize(stride * collective_.world_size());
  const auto scales_of = [&](std::byte* bytes) {
    return absl::MakeSpan(reinterpret_cast<float*>(bytes), blocks);
  };
  const auto codes_of = [&](std::byte* bytes) {
    return absl::MakeSpan(reinterpret_cast<int8_t*>(bytes + scale_bytes),
                          bucket_size_);
  };
  size_t first_block = 0;
  for (const Part& part : bucket_) {
    const size_t count = CountBlocks(part.count, block);
    const uint64_t place = feedback_begin_[part.gradient] + part.begin;
    QuantizeBlocks(
        absl::MakeConstSpan(packed_).subspan(part.offset, part.count), block,
        absl::MakeConstSpan(feedback_).subspan(place, part.count),
        absl::MakeSpan(next_feedback_).subspan(place, part.count),
        scales_of(sent_.data()).subspan(first_block, count),
        codes_of(sent_.data()).subspan(part.offset, part.count));
    first_block += count;
  }
  OPTSTATE_RETURN_IF_ERROR(
      collective_.AllGather(sent_, absl::MakeSpan(gathered_)));
  std::fill_n(sums_.begin(), bucket_size_, 0.0f);
  for (uint32_t rank = 0; rank < collective_.world_size(); ++rank) {
    std::byte* const bytes = gathered_.data() + rank * stride;
    first_block = 0;
    for (const Part& part : bucket_) {
      const size_t count = CountBlocks(part.count, block);
      const absl::Status added =
          AddBlocks(scales_of(bytes).subspan(first_block, count),
                    codes_of(bytes).subspan(part.offset, part.count), block,
                    absl::MakeSpan(sums_).subspan(part.offset, part.count));
      if (!added.ok()) {
        return Annotate(
            added, absl::StrCat("rank ", rank, ", gradient ", part.gradient));
      }
      first_block += count;
    }
  }
  return absl::OkStatus();
}

void GradientReducer::Unpack(
    absl::Span<const absl::Span<std::byte>> gradients) {
  const double factor = options_.predivide_factor * options_.postscale_factor;
  const double divisor = options_.reduction == ReductionOp::kMean
                             ? static_cast<double>(collective_.world_size())
                             : 1.0;
  for (const Part& part : bucket_) {
    const DType dtype = gradients_[part.gradient].dtype;
    std::byte* const to = gradients[part.gradient].data();
    for (uint64_t i = 0; i < part.count; ++i) {
      const double sum = static_cast<double>(sums_[part.offset + i]);
      StoreGradient(dtype, to, part.begin + i,
                    static_cast<float>(sum * factor / divisor));
    }
  }
}

void GradientReducer::NoteApplied() {
  if (has_next_feedback_) std::swap(feedback_, next_feedback_);
  has_next_feedback_ = false;
}

absl::Span<const float> GradientReducer::feedback(size_t gradient) const {
  if (feedback_begin_.empty()) return {};
  return absl::MakeConstSpan(feedback_).subspan(feedback_begin_[gradient],
                                                gradients_[gradient].numel);
}

}  // namespace optstate::client
