#include "kernels/cpu/cast.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "absl/types/span.h"
#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"
#include "kernels/undo.h"
#include "proto/types/dtype.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cast.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/gradient_sum-inl.h"
#include "kernels/ops/float16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;

enum class Into { kCopy, kCopyOfSum, kAdd, kAddWithUndo };

// The place of the old sums: as elements of the view from `before` on, bit by
// bit.
struct SavedSums {
  UndoSlot* undo;
  size_t before;
};

template <DType kTo>
HWY_INLINE StorageOf<kTo>* OldSums(SavedSums saved) {
  return reinterpret_cast<StorageOf<kTo>*>(saved.undo->old_sum) + saved.before;
}

// Copies a vector of elements, bit by bit.
template <DType kDType>
HWY_INLINE void CopyElements(const StorageOf<kDType>* from,
                             StorageOf<kDType>* to) {
  const hn::Rebind<StorageOf<kDType>, Floats> elements;
  hn::StoreU(hn::LoadU(elements, from), elements, to);
}

// Sets out[i...] to in[i...], or adds that, in float and rounded; undo.h says
// why in this order.
template <DType kFrom, DType kTo, Into kInto>
HWY_INLINE void IntoVector(Floats d, const StorageOf<kFrom>* in,
                           StorageOf<kTo>* out, size_t i, SavedSums saved) {
  auto value = LoadFloats<kFrom>(d, in + i);
  if constexpr (kInto == Into::kCopyOfSum) value = ops::CanonicalNan(d, value);
  if constexpr (kInto == Into::kAdd || kInto == Into::kAddWithUndo) {
    const auto sum = LoadFloats<kTo>(d, out + i);
    if constexpr (kInto == Into::kAddWithUndo) {
      CopyElements<kTo>(out + i, OldSums<kTo>(saved) + i);
      PublishSaved(saved.undo, saved.before + i + hn::Lanes(d));
    }
    value = ops::CanonicalNan(d, hn::Add(sum, value));
  }
  StoreFloats<kTo>(d, value, out + i);
}

template <DType kFrom, DType kTo, Into kInto>
void IntoElements(const void* in, void* out, size_t numel, SavedSums saved) {
  const auto* from = static_cast<const StorageOf<kFrom>*>(in);
  auto* to = static_cast<StorageOf<kTo>*>(out);
  const Floats d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    IntoVector<kFrom, kTo, kInto>(d, from, to, i, saved);
  }
  if (i == numel) return;
  // The tail goes through a whole vector on the stack (see update_tail-inl.h).
  const size_t rest = numel - i;
  StorageOf<kFrom> rest_in[hn::MaxLanes(d)] = {};
  StorageOf<kTo> rest_out[hn::MaxLanes(d)] = {};
  std::memcpy(rest_in, from + i, rest * sizeof(rest_in[0]));
  std::memcpy(rest_out, to + i, rest * sizeof(rest_out[0]));
  if constexpr (kInto == Into::kAddWithUndo) {
    std::memcpy(OldSums<kTo>(saved) + i, rest_out, rest * sizeof(rest_out[0]));
    PublishSaved(saved.undo, saved.before + numel);
  }
  constexpr Into kRestInto = kInto == Into::kAddWithUndo ? Into::kAdd : kInto;
  IntoVector<kFrom, kTo, kRestInto>(d, rest_in, rest_out, 0, {});
  std::memcpy(to + i, rest_out, rest * sizeof(rest_out[0]));
}

template <DType kTo>
void FromFloat(const float* in, void* out, size_t numel) {
  auto* elements = static_cast<StorageOf<kTo>*>(out);
  const Floats d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    StoreFloats<kTo>(d, hn::LoadU(d, in + i), elements + i);
  }
  if (i == numel) return;
  const size_t rest = numel - i;
  float rest_in[hn::MaxLanes(d)] = {};
  StorageOf<kTo> rest_out[hn::MaxLanes(d)];
  std::memcpy(rest_in, in + i, rest * sizeof(float));
  StoreFloats<kTo>(d, hn::LoadU(d, rest_in), rest_out);
  std::memcpy(elements + i, rest_out, rest * sizeof(rest_out[0]));
}

template <Into kInto>
void ToFloatOfDType(DType from, const void* in, float* out, size_t numel,
                    SavedSums saved) {
  constexpr DType kFloat = DType::kFloat32;
  switch (from) {
    case DType::kFloat32:
      return IntoElements<DType::kFloat32, kFloat, kInto>(in, out, numel,
                                                          saved);
    case DType::kBFloat16:
      return IntoElements<DType::kBFloat16, kFloat, kInto>(in, out, numel,
                                                           saved);
    case DType::kFloat16:
      return IntoElements<DType::kFloat16, kFloat, kInto>(in, out, numel,
                                                          saved);
  }
}

void CopyToFloat(DType from, const void* in, float* out, size_t numel) {
  ToFloatOfDType<Into::kCopy>(from, in, out, numel, {});
}

// Several gradients are summed strip by strip in the first-level cache.
template <DType kTo, Into kInto>
void SumInto(DType dtype, absl::Span<const void* const> gradients, void* out,
             size_t numel, UndoSlot* undo) {
  constexpr size_t kStripElements = 1024;
  HWY_ALIGN float strip[kStripElements];
  for (size_t begin = 0; begin < numel; begin += kStripElements) {
    const size_t count = std::min(kStripElements, numel - begin);
    SumOfGradients(dtype, gradients, begin, count, strip);
    IntoElements<DType::kFloat32, kTo, kInto>(
        strip, static_cast<StorageOf<kTo>*>(out) + begin, count, {undo, begin});
  }
}

// Copies or adds gradients into sums of float32.
template <Into kOfOne, Into kOfSum>
void GradientsToFloat(DType dtype, absl::Span<const void* const> gradients,
                      void* out, size_t numel, UndoSlot* undo) {
  if (gradients.size() == 1) {
    ToFloatOfDType<kOfOne>(dtype, gradients[0], static_cast<float*>(out), numel,
                           {undo, 0});
  } else {
    SumInto<DType::kFloat32, kOfSum>(dtype, gradients, out, numel, undo);
  }
}

// Copies or adds gradients into sums of their own dtype.
template <DType kDType, Into kInto>
void GradientsToOwn(absl::Span<const void* const> gradients, void* out,
                    size_t numel, UndoSlot* undo) {
  if (gradients.size() == 1) {
    IntoElements<kDType, kDType, kInto>(gradients[0], out, numel, {undo, 0});
  } else {
    SumInto<kDType, kInto>(kDType, gradients, out, numel, undo);
  }
}

template <Into kOfOne, Into kOfSum>
void GradientsInto(DType dtype, absl::Span<const void* const> gradients,
                   DType sum_dtype, void* sum, size_t numel, UndoSlot* undo) {
  switch (sum_dtype) {
    case DType::kFloat32:
      return GradientsToFloat<kOfOne, kOfSum>(dtype, gradients, sum, numel,
                                              undo);
    case DType::kBFloat16:
      return GradientsToOwn<DType::kBFloat16, kOfSum>(gradients, sum, numel,
                                                      undo);
    case DType::kFloat16:
      return GradientsToOwn<DType::kFloat16, kOfSum>(gradients, sum, numel,
                                                     undo);
  }
}

void AccumulateAll(DType dtype, absl::Span<const void* const> gradients,
                   bool first, DType sum_dtype, void* sum, size_t numel,
                   UndoSlot* undo) {
  using enum Into;
  if (first) {
    GradientsInto<kCopy, kCopyOfSum>(dtype, gradients, sum_dtype, sum, numel,
                                     nullptr);
  } else if (undo == nullptr) {
    GradientsInto<kAdd, kAdd>(dtype, gradients, sum_dtype, sum, numel, nullptr);
  } else {
    GradientsInto<kAddWithUndo, kAddWithUndo>(dtype, gradients, sum_dtype, sum,
                                              numel, undo);
  }
}

void CopyFromFloat(DType to, const float* in, void* out, size_t numel) {
  switch (to) {
    case DType::kFloat32:
      return FromFloat<DType::kFloat32>(in, out, numel);
    case DType::kBFloat16:
      return FromFloat<DType::kBFloat16>(in, out, numel);
    case DType::kFloat16:
      return FromFloat<DType::kFloat16>(in, out, numel);
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

constexpr auto kCopyToFloat = OPTSTATE_TARGET_TABLE(CopyToFloat);
constexpr auto kAccumulateAll = OPTSTATE_TARGET_TABLE(AccumulateAll);
constexpr auto kCopyFromFloat = OPTSTATE_TARGET_TABLE(CopyFromFloat);

}  // namespace

void CastToFloatOn(Target target, DType from, const void* in, float* out,
                   size_t numel) {
  kCopyToFloat.For(target)(from, in, out, numel);
}

void CastFromFloatOn(Target target, DType to, const float* in, void* out,
                     size_t numel) {
  kCopyFromFloat.For(target)(to, in, out, numel);
}

void AccumulateOn(Target target, DType dtype,
                  absl::Span<const void* const> gradients, bool first,
                  DType sum_dtype, void* sum, size_t numel, UndoSlot* undo) {
  kAccumulateAll.For(target)(dtype, gradients, first, sum_dtype, sum, numel,
                             undo);
}

}  // namespace optstate::kernels::cpu

#endif  // HWY_ONCE
