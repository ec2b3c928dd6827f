#include "kernels/cpu/cast.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"
#include "kernels/undo.h"
#include "proto/types/dtype.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cast.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/undo-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;

// out[i] = float(in[i]), or that added to out[i] when kAdd.
template <DType kFrom, bool kAdd>
HWY_INLINE void ToFloatVector(Floats d, const StorageOf<kFrom>* in,
                              float* out) {
  auto value = LoadFloats<kFrom>(d, in);
  if constexpr (kAdd) {
    value = CanonicalNan(d, hn::Add(hn::LoadU(d, out), value));
  }
  hn::StoreU(value, d, out);
}

template <DType kFrom, bool kAdd>
void ToFloat(const void* in, float* out, size_t numel) {
  const auto* elements = static_cast<const StorageOf<kFrom>*>(in);
  const Floats d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    ToFloatVector<kFrom, kAdd>(d, elements + i, out + i);
  }
  if (i == numel) return;
  // The tail, through a whole vector on the stack (see update-inl.h).
  const size_t rest = numel - i;
  StorageOf<kFrom> rest_in[hn::MaxLanes(d)] = {};
  float rest_out[hn::MaxLanes(d)] = {};
  std::memcpy(rest_in, elements + i, rest * sizeof(rest_in[0]));
  std::memcpy(rest_out, out + i, rest * sizeof(float));
  ToFloatVector<kFrom, kAdd>(d, rest_in, rest_out);
  std::memcpy(out + i, rest_out, rest * sizeof(float));
}

// ToFloat that adds, so that each addition can be undone.
template <DType kFrom>
void AddWithUndo(const void* in, float* out, size_t numel, UndoSlot* undo) {
  const auto* elements = static_cast<const StorageOf<kFrom>*>(in);
  for (size_t begin = 0; begin < numel; begin += kUndoBlockElements) {
    const size_t end = std::min(begin + kUndoBlockElements, numel);
    SaveOldValues(Floats(), out, undo->old[0], begin, end);
    PublishSaved(undo, end);
    ToFloat<kFrom, true>(elements + begin, out + begin, end - begin);
  }
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

void CopyToFloat(DType from, const void* in, float* out, size_t numel) {
  switch (from) {
    case DType::kFloat32:
      return ToFloat<DType::kFloat32, false>(in, out, numel);
    case DType::kBFloat16:
      return ToFloat<DType::kBFloat16, false>(in, out, numel);
    case DType::kFloat16:
      return ToFloat<DType::kFloat16, false>(in, out, numel);
  }
}

template <DType kFrom>
void AddToFloat(const void* in, float* out, size_t numel, UndoSlot* undo) {
  if (undo == nullptr) return ToFloat<kFrom, true>(in, out, numel);
  AddWithUndo<kFrom>(in, out, numel, undo);
}

void AddToFloatOfDType(DType from, const void* in, float* out, size_t numel,
                       UndoSlot* undo) {
  switch (from) {
    case DType::kFloat32:
      return AddToFloat<DType::kFloat32>(in, out, numel, undo);
    case DType::kBFloat16:
      return AddToFloat<DType::kBFloat16>(in, out, numel, undo);
    case DType::kFloat16:
      return AddToFloat<DType::kFloat16>(in, out, numel, undo);
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
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::cpu {
namespace {

constexpr auto kCopyToFloat = OPTSTATE_TARGET_TABLE(CopyToFloat);
constexpr auto kAddToFloat = OPTSTATE_TARGET_TABLE(AddToFloatOfDType);
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

void AccumulateOn(Target target, DType dtype, const void* gradient, bool first,
                  float* sum, size_t numel, UndoSlot* undo) {
  if (first) {
    kCopyToFloat.For(target)(dtype, gradient, sum, numel);
  } else {
    kAddToFloat.For(target)(dtype, gradient, sum, numel, undo);
  }
}

}  // namespace optstate::cpu

#endif  // HWY_ONCE
