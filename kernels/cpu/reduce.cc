#include "kernels/cpu/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"
#include "proto/types/dtype.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/reduce.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_REDUCE_CC_
#define OPTSTATE_KERNELS_CPU_REDUCE_CC_
namespace optstate::cpu {

// Part of the definition of the sum, not of the machine.
inline constexpr size_t kAccumulators = 16;

// Elements whose squares are summed before the next accumulators' turn: as many
// as stay in the first-level cache.
inline constexpr size_t kStripElements = 2048;
static_assert(kStripElements % kAccumulators == 0);

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_REDUCE_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// As many accumulators as a vector holds, at most half of them all.
using Doubles = hn::CappedTag<double, kAccumulators / 2>;

template <DType kDType>
HWY_INLINE hn::Vec<Doubles> LoadSquares(Doubles d,
                                        const StorageOf<kDType>* from) {
  const hn::Rebind<float, Doubles> df;
  const auto element = hn::PromoteTo(d, LoadFloats<kDType>(df, from));
  // Exact: 24 bits of mantissa make 48. So fusing it with the addition would
  // change nothing, here alone.
  return hn::Mul(element, element);
}

// Adds element i's square to accumulators[i % 16]. `count` is a multiple of 16.
// Two vectors of accumulators at a time, so that they stay in registers: the
// two that SumOfAccumulators adds first.
template <DType kDType>
HWY_INLINE void AddSquares(const StorageOf<kDType>* gradient, size_t count,
                           double* accumulators) {
  constexpr size_t kHalf = kAccumulators / 2;
  const Doubles d;
  for (size_t k = 0; k < kHalf; k += hn::Lanes(d)) {
    auto low = hn::LoadU(d, accumulators + k);
    auto high = hn::LoadU(d, accumulators + k + kHalf);
    for (size_t i = k; i < count; i += kAccumulators) {
      low = hn::Add(low, LoadSquares<kDType>(d, gradient + i));
      high = hn::Add(high, LoadSquares<kDType>(d, gradient + i + kHalf));
    }
    hn::StoreU(low, d, accumulators + k);
    hn::StoreU(high, d, accumulators + k + kHalf);
  }
}

template <DType kDType>
void AddAllSquares(const void* gradient, size_t numel, double* accumulators) {
  const auto* elements = static_cast<const StorageOf<kDType>*>(gradient);
  const size_t whole = numel - numel % kAccumulators;
  for (size_t begin = 0; begin < whole; begin += kStripElements) {
    AddSquares<kDType>(elements + begin,
                       std::min(kStripElements, whole - begin), accumulators);
  }
  // The rest is filled up with zeros, which change no accumulator.
  StorageOf<kDType> rest[kAccumulators] = {};
  std::memcpy(rest, elements + whole, (numel - whole) * sizeof(rest[0]));
  if (whole < numel) AddSquares<kDType>(rest, kAccumulators, accumulators);
}

void AddSquaresOfDType(DType dtype, const void* gradient, size_t numel,
                       double* accumulators) {
  switch (dtype) {
    case DType::kFloat32:
      return AddAllSquares<DType::kFloat32>(gradient, numel, accumulators);
    case DType::kBFloat16:
      return AddAllSquares<DType::kBFloat16>(gradient, numel, accumulators);
    case DType::kFloat16:
      return AddAllSquares<DType::kFloat16>(gradient, numel, accumulators);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::cpu {
namespace {

constexpr auto kAddSquaresOfDType = OPTSTATE_TARGET_TABLE(AddSquaresOfDType);

double SumOfAccumulators(double* accumulators) {
  for (size_t half = kAccumulators / 2; half > 0; half /= 2) {
    for (size_t k = 0; k < half; ++k) accumulators[k] += accumulators[k + half];
  }
  // One NaN, whatever the machine makes.
  if (std::isnan(accumulators[0])) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return accumulators[0];
}

}  // namespace

double SumOfSquaresOn(Target target, DType dtype, const void* gradient,
                      size_t numel) {
  if (numel == 0) return 0;
  double accumulators[kAccumulators] = {};
  kAddSquaresOfDType.For(target)(dtype, gradient, numel, accumulators);
  return SumOfAccumulators(accumulators);
}

}  // namespace optstate::cpu

#endif  // HWY_ONCE
