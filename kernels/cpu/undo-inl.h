// Saving old values for an UndoSlot (kernels/undo.h). Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_UNDO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_UNDO_INL_H_
#undef OPTSTATE_KERNELS_CPU_UNDO_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_UNDO_INL_H_
#endif

#include <cstddef>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Copies elements [begin, end) to their own indices, and not one more.
template <class D>
HWY_INLINE void SaveOldValues(D d, const float* from, float* to, size_t begin,
                              size_t end) {
  size_t i = begin;
  for (; i + hn::Lanes(d) <= end; i += hn::Lanes(d)) {
    hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  }
  std::memcpy(to + i, from + i, (end - i) * sizeof(float));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
