// Pairs of vectors from and to bfloat16 in memory, in less work than one by
// one. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_HALF_PAIRS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_HALF_PAIRS_INL_H_
#undef OPTSTATE_KERNELS_CPU_HALF_PAIRS_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_HALF_PAIRS_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/ops/float16-inl.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Loads two vectors' bfloat16 as floats. On vectors of several 128 bits four
// and four, which takes half the work of two vectors in order: of each 128 bits
// `low` has the first four, `high` the others.
template <class D, class V>
HWY_INLINE void LoadHalfBlocks(D d, const uint16_t* from, V& low, V& high) {
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
  low = LoadFloats<DType::kBFloat16>(d, from);
  high = LoadFloats<DType::kBFloat16>(d, from + hn::Lanes(d));
#else
  const hn::Repartition<uint16_t, D> d16;
  const auto bits = hn::LoadU(d16, from);
  const auto zero = hn::Zero(d16);
  low = hn::BitCast(d, hn::InterleaveLower(d16, zero, bits));
  high = hn::BitCast(d, hn::InterleaveUpper(d16, zero, bits));
#endif
}

// Puts what LoadHalfBlocks gave, or sums of such, in order.
template <class D, class V>
HWY_INLINE void OrderHalfBlocks([[maybe_unused]] D d, [[maybe_unused]] V& low,
                                [[maybe_unused]] V& high) {
#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE
  if constexpr (hn::MaxLanes(d) > 4) {
    const V first = hn::ConcatLowerLower(d, high, low);
    high = hn::ConcatUpperUpper(d, high, low);
    low = first;
  }
  if constexpr (hn::MaxLanes(d) == 16) {
    HWY_ALIGN static constexpr int32_t kMiddleBlocksSwapped[16] = {
        0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};
    const auto order = hn::SetTableIndices(d, kMiddleBlocksSwapped);
    low = hn::TableLookupLanes(low, order);
    high = hn::TableLookupLanes(high, order);
  }
#endif
}

// Stores two vectors, one behind the other; no lane is NaN. The upper halves of
// both make one vector without being shifted down first.
template <class D, class V>
HWY_INLINE void StoreBFloat16Pair(D d, V first, V second, uint16_t* to) {
#if HWY_TARGET == HWY_SCALAR
  StoreFloats<DType::kBFloat16, true>(d, first, to);
  StoreFloats<DType::kBFloat16, true>(d, second, to + 1);
#else
  const hn::Repartition<uint16_t, D> d16;
  const auto low = hn::BitCast(d16, RoundedToUpperHalf(d, first));
  const auto high = hn::BitCast(d16, RoundedToUpperHalf(d, second));
  hn::StoreU(hn::ConcatOdd(d16, high, low), d16, to);
#endif
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
