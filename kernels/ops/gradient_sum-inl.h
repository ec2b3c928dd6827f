// The sum of several gradients' elements. Per-target include.

#if defined(OPTSTATE_KERNELS_OPS_GRADIENT_SUM_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_OPS_GRADIENT_SUM_INL_H_
#undef OPTSTATE_KERNELS_OPS_GRADIENT_SUM_INL_H_
#else
#define OPTSTATE_KERNELS_OPS_GRADIENT_SUM_INL_H_
#endif

#include <cstddef>

#include "kernels/ops/float16-inl.h"
#include "proto/types/dtype.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

template <DType kDType, class D>
OPTSTATE_OP ops::Vec<D> SumOfVectors(D d, const void* const* gradients,
                                     size_t count, size_t i) {
  using Element = StorageOf<kDType>;
  auto sum =
      LoadFloats<kDType>(d, static_cast<const Element*>(gradients[0]) + i);
  for (size_t k = 1; k < count; ++k) {
    const auto* gradient = static_cast<const Element*>(gradients[k]);
    sum = ops::Add(sum, LoadFloats<kDType>(d, gradient + i));
  }
  return sum;
}

// Elements [begin, ...) of gradients that are summed in float as they are
// loaded, in order, each sum rounded.
struct GradientElements {
  const void* const* gradients;
  size_t count;
  DType dtype;
  size_t begin;

  template <class D>
  OPTSTATE_OP ops::Vec<D> Load(D d, size_t i) const {
    switch (dtype) {
      case DType::kFloat32:
        break;
      case DType::kBFloat16:
        return SumOfVectors<DType::kBFloat16>(d, gradients, count, begin + i);
      case DType::kFloat16:
        return SumOfVectors<DType::kFloat16>(d, gradients, count, begin + i);
    }
    return SumOfVectors<DType::kFloat32>(d, gradients, count, begin + i);
  }
};

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
