// The sum of several gradients. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_GRADIENT_SUM_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_GRADIENT_SUM_INL_H_
#undef OPTSTATE_KERNELS_CPU_GRADIENT_SUM_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_GRADIENT_SUM_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/half_pairs-inl.h"
#include "kernels/ops/float16-inl.h"
#include "kernels/ops/gradient_sum-inl.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Sums gradients in two vectors, one behind the other.
template <DType kDType, class D, class V>
HWY_INLINE void SumOfPairs(D d, const void* const* gradients, size_t count,
                           size_t i, V& first, V& second) {
  using Element = StorageOf<kDType>;
  const auto load = [&](size_t k, V& a, V& b) HWY_ATTR {
    const auto* gradient = static_cast<const Element*>(gradients[k]) + i;
    if constexpr (kDType == DType::kBFloat16) {
      LoadHalfBlocks(d, gradient, a, b);
    } else {
      a = LoadFloats<kDType>(d, gradient);
      b = LoadFloats<kDType>(d, gradient + hn::Lanes(d));
    }
  };
  load(0, first, second);
  for (size_t k = 1; k < count; ++k) {
    V a, b;
    load(k, a, b);
    first = hn::Add(first, a);
    second = hn::Add(second, b);
  }
  if constexpr (kDType == DType::kBFloat16) OrderHalfBlocks(d, first, second);
}

// GradientElements, as a walk over a tile loads them.
struct GradientSum : GradientElements {
  template <class D, class V>
  HWY_INLINE void LoadPair(D d, size_t i, V& first, V& second) const {
    switch (dtype) {
      case DType::kFloat32:
        break;
      case DType::kBFloat16:
        return SumOfPairs<DType::kBFloat16>(d, gradients, count, begin + i,
                                            first, second);
      case DType::kFloat16:
        return SumOfPairs<DType::kFloat16>(d, gradients, count, begin + i,
                                           first, second);
    }
    SumOfPairs<DType::kFloat32>(d, gradients, count, begin + i, first, second);
  }

  // Writes `numel` elements from `at` on, as floats.
  void Gather(size_t at, size_t numel, float* out) const;

  // Gradients of 16 bits get no prefetch: the hardware is early enough, and
  // many prefetches are in the way.
  HWY_INLINE void Prefetch(size_t i) const {
    if (dtype != DType::kFloat32) return;
    for (size_t k = 0; k < count; ++k) {
      hwy::Prefetch(static_cast<const float*>(gradients[k]) + begin + i);
    }
  }
};

template <DType kDType>
void SumOfGradientsOf(const void* const* gradients, size_t count, size_t begin,
                      size_t numel, float* sum) {
  using Element = StorageOf<kDType>;
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + 2 * lanes <= numel; i += 2 * lanes) {
    hn::Vec<decltype(d)> first, second;
    SumOfPairs<kDType>(d, gradients, count, begin + i, first, second);
    hn::StoreU(first, d, sum + i);
    hn::StoreU(second, d, sum + i + lanes);
  }
  for (; i + lanes <= numel; i += lanes) {
    hn::StoreU(SumOfVectors<kDType>(d, gradients, count, begin + i), d,
               sum + i);
  }
  if (i == numel) return;
  // The tail goes gradient by gradient through a whole vector on the stack.
  const size_t rest = numel - i;
  HWY_ALIGN float rest_sum[hn::MaxLanes(d)];
  for (size_t k = 0; k < count; ++k) {
    HWY_ALIGN Element element[hn::MaxLanes(d)] = {};
    const auto* gradient = static_cast<const Element*>(gradients[k]);
    std::memcpy(element, gradient + begin + i, rest * sizeof(Element));
    auto value = LoadFloats<kDType>(d, element);
    if (k > 0) value = hn::Add(hn::Load(d, rest_sum), value);
    hn::Store(value, d, rest_sum);
  }
  std::memcpy(sum + i, rest_sum, rest * sizeof(float));
}

// Sets sum[i] = gradients[0][begin + i] + gradients[1][begin + i] + ... in
// float, in this order, each sum rounded, for `numel` elements.
HWY_INLINE void SumOfGradients(DType dtype,
                               absl::Span<const void* const> gradients,
                               size_t begin, size_t numel, float* sum) {
  const void* const* data = gradients.data();
  const size_t count = gradients.size();
  switch (dtype) {
    case DType::kFloat32:
      return SumOfGradientsOf<DType::kFloat32>(data, count, begin, numel, sum);
    case DType::kBFloat16:
      return SumOfGradientsOf<DType::kBFloat16>(data, count, begin, numel, sum);
    case DType::kFloat16:
      return SumOfGradientsOf<DType::kFloat16>(data, count, begin, numel, sum);
  }
}

inline void GradientSum::Gather(size_t at, size_t numel, float* out) const {
  SumOfGradients(dtype, {gradients, count}, begin + at, numel, out);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
