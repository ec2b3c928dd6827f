#include "kernels/cpu/reduce.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "absl/types/span.h"
#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"
#include "kernels/reduction.h"
#include "kernels/reduction_order.h"
#include "proto/types/dtype.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/reduce.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/gradient_sum-inl.h"
#include "kernels/ops/float16-inl.h"
#include "kernels/ops/reduction-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_REDUCE_CC_
#define OPTSTATE_KERNELS_CPU_REDUCE_CC_
namespace optstate::kernels::cpu {

inline constexpr size_t kAccumulators = kReductionAccumulators;

// The elements reduced before the next accumulators' turn: as many as stay in
// the first-level cache, with a copy.
inline constexpr size_t kStripElements = 2048;
static_assert(kStripElements % kAccumulators == 0);

}  // namespace optstate::kernels::cpu
#endif  // OPTSTATE_KERNELS_CPU_REDUCE_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A vector of as many accumulators as it holds, at most half of them all.
using Doubles = hn::CappedTag<double, kAccumulators / 2>;

template <DType kDType>
HWY_INLINE hn::Vec<Doubles> LoadDoubles(Doubles d,
                                        const StorageOf<kDType>* from) {
  const hn::Rebind<float, Doubles> df;
  return hn::PromoteTo(d, LoadFloats<kDType>(df, from));
}

// Takes element i into accumulators[i % 16]. `count` is a multiple of 16.
// Two vectors of accumulators at a time, so that they stay in registers: the
// two that ResultOfAccumulators takes together first.
template <Reduction kReduction, DType kDType>
HWY_INLINE void TakeStrip(const StorageOf<kDType>* gradient, size_t count,
                          double* accumulators) {
  constexpr size_t kHalf = kAccumulators / 2;
  const Doubles d;
  for (size_t k = 0; k < kHalf; k += hn::Lanes(d)) {
    auto low = hn::LoadU(d, accumulators + k);
    auto high = hn::LoadU(d, accumulators + k + kHalf);
    for (size_t i = k; i < count; i += kAccumulators) {
      low = Taken<kReduction>(low, LoadDoubles<kDType>(d, gradient + i));
      high =
          Taken<kReduction>(high, LoadDoubles<kDType>(d, gradient + i + kHalf));
    }
    hn::StoreU(low, d, accumulators + k);
    hn::StoreU(high, d, accumulators + k + kHalf);
  }
}

template <Reduction kReduction, DType kDType>
void TakeGradient(const void* gradient, size_t numel, double* accumulators) {
  const auto* elements = static_cast<const StorageOf<kDType>*>(gradient);
  const size_t whole = numel - numel % kAccumulators;
  for (size_t begin = 0; begin < whole; begin += kStripElements) {
    TakeStrip<kReduction, kDType>(elements + begin,
                                  std::min(kStripElements, whole - begin),
                                  accumulators);
  }
  if (whole == numel) return;
  // The rest is filled up with zeros, which change no accumulator.
  StorageOf<kDType> rest[kAccumulators] = {};
  std::memcpy(rest, elements + whole, (numel - whole) * sizeof(rest[0]));
  TakeStrip<kReduction, kDType>(rest, kAccumulators, accumulators);
}

template <Reduction kReduction>
void TakeGradients(DType dtype, absl::Span<const void* const> gradients,
                   size_t numel, double* accumulators) {
  if (gradients.size() > 1) {
    HWY_ALIGN float sum[kStripElements];
    for (size_t begin = 0; begin < numel; begin += kStripElements) {
      const size_t count = std::min(kStripElements, numel - begin);
      SumOfGradients(dtype, gradients, begin, count, sum);
      TakeGradient<kReduction, DType::kFloat32>(sum, count, accumulators);
    }
    return;
  }
  const void* gradient = gradients[0];
  switch (dtype) {
    case DType::kFloat32:
      return TakeGradient<kReduction, DType::kFloat32>(gradient, numel,
                                                       accumulators);
    case DType::kBFloat16:
      return TakeGradient<kReduction, DType::kBFloat16>(gradient, numel,
                                                        accumulators);
    case DType::kFloat16:
      return TakeGradient<kReduction, DType::kFloat16>(gradient, numel,
                                                       accumulators);
  }
}

void TakeAll(Reduction reduction, DType dtype,
             absl::Span<const void* const> gradients, size_t numel,
             double* accumulators) {
  switch (reduction) {
    case Reduction::kSumOfSquares:
      return TakeGradients<Reduction::kSumOfSquares>(dtype, gradients, numel,
                                                     accumulators);
    case Reduction::kSumOfAbsolutes:
      return TakeGradients<Reduction::kSumOfAbsolutes>(dtype, gradients, numel,
                                                       accumulators);
    case Reduction::kLargestAbsolute:
      return TakeGradients<Reduction::kLargestAbsolute>(dtype, gradients, numel,
                                                        accumulators);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::kernels::cpu {
namespace {

constexpr auto kTakeAll = OPTSTATE_TARGET_TABLE(TakeAll);

}  // namespace

double ReduceOn(Target target, Reduction reduction, DType dtype,
                absl::Span<const void* const> gradients, size_t numel) {
  if (numel == 0) return 0;
  double accumulators[kAccumulators] = {};
  kTakeAll.For(target)(reduction, dtype, gradients, numel, accumulators);
  return ResultOfAccumulators(reduction, accumulators);
}

}  // namespace optstate::kernels::cpu

#endif  // HWY_ONCE
