#include "client/collective/sharded/gradient_norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/base/casts.h"
#include "client/collective/gather.h"
#include "client/collective/gradients/gradient_elements.h"
#include "proto/types/runs.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr size_t kAccumulators = 16;

// Takes two accumulators, or the numbers of two runs, together.
template <NormType kType>
double Together(double a, double b) {
  if constexpr (kType != NormType::kLargestAbsolute) {
    return a + b;
  } else {
    return b > a || std::isnan(b) ? b : a;
  }
}

double Together(NormType type, double a, double b) {
  return type == NormType::kLargestAbsolute
             ? Together<NormType::kLargestAbsolute>(a, b)
             : Together<NormType::kEuclidean>(a, b);
}

template <NormType kType, DType kDType>
double Reduce(const std::byte* gradient, uint64_t begin, uint64_t count) {
  std::array<double, kAccumulators> accumulators = {};
  for (uint64_t i = 0; i < count; ++i) {
    const auto element =
        static_cast<double>(LoadGradient(kDType, gradient, begin + i));
    double& accumulator = accumulators[i % kAccumulators];
    // The square of a float is exact in double.
    accumulator = Together<kType>(accumulator, kType == NormType::kEuclidean
                                                   ? element * element
                                                   : std::abs(element));
  }
  for (size_t half = kAccumulators / 2; half > 0; half /= 2) {
    for (size_t k = 0; k < half; ++k) {
      accumulators[k] =
          Together<kType>(accumulators[k], accumulators[k + half]);
    }
  }
  return accumulators[0];
}

template <NormType kType>
double ReduceAs(DType dtype, const std::byte* gradient, uint64_t begin,
                uint64_t count) {
  switch (dtype) {
    case DType::kBFloat16:
      return Reduce<kType, DType::kBFloat16>(gradient, begin, count);
    case DType::kFloat16:
      return Reduce<kType, DType::kFloat16>(gradient, begin, count);
    default:
      return Reduce<kType, DType::kFloat32>(gradient, begin, count);
  }
}

}  // namespace

double ReduceRun(NormType type, DType dtype, const std::byte* gradient,
                 uint64_t begin, uint64_t count) {
  switch (type) {
    case NormType::kSumOfAbsolutes:
      return ReduceAs<NormType::kSumOfAbsolutes>(dtype, gradient, begin, count);
    case NormType::kLargestAbsolute:
      return ReduceAs<NormType::kLargestAbsolute>(dtype, gradient, begin,
                                                  count);
    default:
      return ReduceAs<NormType::kEuclidean>(dtype, gradient, begin, count);
  }
}

GradientNorm::GradientNorm(const Layout* layout,
                           const std::vector<Share>* shares)
    : layout_(*layout), shares_(*shares) {
  for (const Share& share : shares_) {
    size_t numbers = 0;
    for (const OwnedPart& part : share.parts()) numbers += CountOf(part);
    numbers_max_ = std::max(numbers_max_, numbers);
  }
}

size_t GradientNorm::CountOf(const OwnedPart& part) const {
  const ParameterSpec& spec = layout_.parameters()[part.parameter];
  if (part.count == static_cast<uint64_t>(spec.numel)) return 1;
  return layout_.run_of(part.parameter, part.begin + part.count - 1) -
         layout_.run_of(part.parameter, part.begin) + 1;
}

void GradientNorm::ReducePart(NormType type, const OwnedPart& part,
                              const std::byte* gradient,
                              absl::Span<uint64_t> numbers) const {
  const DType dtype = layout_.parameters()[part.parameter].gradient_dtype;
  const bool is_cut = numbers.size() > 1;
  size_t next = 0;
  double together = 0;
  ForEachRun(layout_, part.parameter, part.begin, part.begin + part.count,
             [&](uint64_t /*run*/, uint64_t begin, uint64_t count) {
               const double number =
                   ReduceRun(type, dtype, gradient, begin - part.begin, count);
               together = Together(type, together, number);
               if (is_cut) numbers[next++] = absl::bit_cast<uint64_t>(number);
             });
  if (!is_cut) numbers[0] = absl::bit_cast<uint64_t>(together);
}

absl::StatusOr<double> GradientNorm::Compute(
    Collective& collective, NormType type,
    absl::Span<const std::vector<std::byte>> mine,
    const std::vector<bool>& has_gradient) const {
  std::vector<uint64_t> numbers(numbers_max_, 0);
  const std::vector<OwnedPart>& parts = shares_[collective.rank()].parts();
  size_t place = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t count = CountOf(parts[i]);
    if (has_gradient[parts[i].parameter]) {
      ReducePart(type, parts[i], mine[i].data(),
                 absl::MakeSpan(numbers).subspan(place, count));
    }
    place += count;
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                            GatherNumbers(collective, numbers));
  // By rank: the part of its share, and the place of its number, that is next.
  std::vector<size_t> next_parts(shares_.size(), 0);
  std::vector<size_t> next_places(shares_.size(), 0);
  double norm = 0;
  for (uint32_t p = 0; p < layout_.parameters().size(); ++p) {
    double of_parameter = 0;
    // Ranks own the runs of a parameter that is cut in their order.
    for (size_t rank = 0; rank < shares_.size(); ++rank) {
      const std::vector<OwnedPart>& owned = shares_[rank].parts();
      size_t& part = next_parts[rank];
      if (part == owned.size() || owned[part].parameter != p) continue;
      const size_t count = CountOf(owned[part]);
      for (size_t k = 0; k < count; ++k) {
        const uint64_t number =
            all[rank * numbers_max_ + next_places[rank] + k];
        of_parameter =
            Together(type, of_parameter, absl::bit_cast<double>(number));
      }
      next_places[rank] += count;
      ++part;
    }
    if (has_gradient[p]) norm = Together(type, norm, of_parameter);
  }
  return type == NormType::kEuclidean ? std::sqrt(norm) : norm;
}

}  // namespace optstate::client
