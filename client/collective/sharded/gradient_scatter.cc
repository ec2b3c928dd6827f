#include "client/collective/sharded/gradient_scatter.h"

#include <algorithm>

#include "client/collective/gradients/gradient_elements.h"
#include "client/collective/half_floats.h"
#include "proto/types/dtype.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

template <typename Number>
absl::Span<std::byte> BytesOf(std::vector<Number>& numbers, uint64_t count) {
  return absl::MakeSpan(reinterpret_cast<std::byte*>(numbers.data()),
                        count * sizeof(Number));
}

}  // namespace

GradientScatter::GradientScatter(Collective* collective, const Layout* layout,
                                 const std::vector<Share>* shares,
                                 const ReducerOptions& how)
    : collective_(*collective), layout_(*layout), shares_(*shares), how_(how) {
  for (const Share& each : shares_) longest_ = std::max(longest_, each.size());
  for (const OwnedPart& part : mine().parts()) {
    const ParameterSpec& spec = layout_.parameters()[part.parameter];
    reduced_.emplace_back(part.count * SizeInBytes(spec.gradient_dtype));
  }
}

void GradientScatter::Pack(
    absl::Span<const absl::Span<const std::byte>> gradients,
    const std::vector<bool>& has_mine, uint64_t begin, uint64_t size) {
  sums_.assign(size * shares_.size(), 0.0f);
  for (size_t rank = 0; rank < shares_.size(); ++rank) {
    float* const to = sums_.data() + rank * size;
    const Share& share = shares_[rank];
    share.Visit(begin, begin + size,
                [&](size_t index, uint64_t at, uint64_t count, uint64_t place) {
                  const uint32_t p = share.parts()[index].parameter;
                  if (!has_mine[p]) return;
                  const DType dtype = layout_.parameters()[p].gradient_dtype;
                  for (uint64_t i = 0; i < count; ++i) {
                    const auto value = static_cast<double>(
                        LoadGradient(dtype, gradients[p].data(), at + i));
                    to[place + i] =
                        static_cast<float>(value / how_.predivide_factor);
                  }
                });
  }
}

absl::Status GradientScatter::ScatterSums(uint64_t size) {
  scattered_.resize(size);
  if (how_.communication == ElementType::kFloat32) {
    return collective_.ReduceScatter(ElementType::kFloat32,
                                     BytesOf(sums_, sums_.size()),
                                     BytesOf(scattered_, size));
  }
  halves_.resize(sums_.size());
  scattered_halves_.resize(size);
  std::transform(sums_.begin(), sums_.end(), halves_.begin(),
                 &BFloat16FromFloat);
  OPTSTATE_RETURN_IF_ERROR(collective_.ReduceScatter(
      ElementType::kBFloat16, BytesOf(halves_, halves_.size()),
      BytesOf(scattered_halves_, size)));
  std::transform(scattered_halves_.begin(), scattered_halves_.end(),
                 scattered_.begin(), &FloatFromBFloat16);
  return absl::OkStatus();
}

void GradientScatter::Unpack(uint64_t begin, uint64_t size) {
  const double factor = how_.predivide_factor * how_.postscale_factor;
  const double divisor = how_.reduction == ReductionOp::kMean
                             ? static_cast<double>(collective_.world_size())
                             : 1.0;
  mine().Visit(begin, begin + size,
               [&](size_t index, uint64_t at, uint64_t count, uint64_t place) {
                 const OwnedPart& part = mine().parts()[index];
                 const DType dtype =
                     layout_.parameters()[part.parameter].gradient_dtype;
                 std::byte* const to = reduced_[index].data();
                 for (uint64_t i = 0; i < count; ++i) {
                   const auto sum = static_cast<double>(scattered_[place + i]);
                   StoreGradient(dtype, to, at - part.begin + i,
                                 static_cast<float>(sum * factor / divisor));
                 }
               });
}

// The buckets of all ranks have as many elements of each share, so that each
// rank sums as much.
absl::Status GradientScatter::Reduce(
    absl::Span<const absl::Span<const std::byte>> gradients,
    const std::vector<bool>& has_mine) {
  const uint64_t bucket = std::max<uint64_t>(
      1, how_.bucket_bytes / SizeInBytes(how_.communication) / shares_.size());
  for (uint64_t begin = 0; begin < longest_; begin += bucket) {
    const uint64_t size = std::min(bucket, longest_ - begin);
    Pack(gradients, has_mine, begin, size);
    OPTSTATE_RETURN_IF_ERROR(ScatterSums(size));
    Unpack(begin, size);
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
