// The one walk over a tile that every update rule shares. Per-target include.
//
// A rule is the arithmetic on registers and nothing else:
//
//   struct Rule {
//     static constexpr int kStateArrays;         // 0 to kMaxStateArrays
//     explicit Rule(const UpdateFactors& factors);
//     // `gradient` as it was pushed; the rule scales it. Updates the others
//     // in place; those beyond kStateArrays are neither loaded nor stored.
//     template <class D, class V>
//     void operator()(D d, V gradient, V& master, V& state0, V& state1,
//                     V& state2) const;
//   };
//
// Vectors are passed one by one because those of a scalable instruction set
// (SVE) cannot be members of a struct or an array.

#if defined(OPTSTATE_KERNELS_CPU_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#undef OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#endif

#include <cstddef>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The arrays of a TileView with their element types.
template <DType kGradient, DType kParameter>
struct TileArrays {
  const StorageOf<kGradient>* gradient;
  StorageOf<kParameter>* parameter;
  float* master;
  float* state[kMaxStateArrays];
};

// How far ahead of the arithmetic to fetch. Square root and division fill the
// CPU's window with few elements, and the hardware's own prefetching stops at
// each page; README.md has what this gains.
inline constexpr size_t kPrefetchElements = 128;

// Asks for what UpdateVector(i) will read. It may lie behind the arrays, where
// a prefetch does no harm; with tiles it is the next one's beginning.
template <class Rule, DType kGradient, DType kParameter>
HWY_INLINE void PrefetchInputs(const TileArrays<kGradient, kParameter>& arrays,
                               size_t i) {
  hwy::Prefetch(arrays.gradient + i);
  hwy::Prefetch(arrays.master + i);
  for (int k = 0; k < Rule::kStateArrays; ++k) {
    hwy::Prefetch(arrays.state[k] + i);
  }
}

// One whole vector of elements, from index `i` on. With kUndo their old values
// go to `position` in `undo` first; undo.h says why in this order.
template <bool kUndo, class D, class Rule, DType kGradient, DType kParameter>
HWY_INLINE void UpdateVector(D d, const Rule& rule,
                             const TileArrays<kGradient, kParameter>& arrays,
                             size_t i, UndoSlot* undo, size_t position) {
  constexpr int kStates = Rule::kStateArrays;
  const auto gradient = LoadFloats<kGradient>(d, arrays.gradient + i);
  auto master = hn::LoadU(d, arrays.master + i);
  auto state0 = hn::Zero(d);
  auto state1 = hn::Zero(d);
  auto state2 = hn::Zero(d);
  if constexpr (kStates > 0) state0 = hn::LoadU(d, arrays.state[0] + i);
  if constexpr (kStates > 1) state1 = hn::LoadU(d, arrays.state[1] + i);
  if constexpr (kStates > 2) state2 = hn::LoadU(d, arrays.state[2] + i);

  if constexpr (kUndo) {
    hn::StoreU(master, d, undo->old[0] + position);
    if constexpr (kStates > 0) hn::StoreU(state0, d, undo->old[1] + position);
    if constexpr (kStates > 1) hn::StoreU(state1, d, undo->old[2] + position);
    if constexpr (kStates > 2) hn::StoreU(state2, d, undo->old[3] + position);
    PublishProgress(undo, UndoProgress(i, position, hn::Lanes(d)));
  }
  rule(d, gradient, master, state0, state1, state2);

  hn::StoreU(master, d, arrays.master + i);
  if constexpr (kStates > 0) hn::StoreU(state0, d, arrays.state[0] + i);
  if constexpr (kStates > 1) hn::StoreU(state1, d, arrays.state[1] + i);
  if constexpr (kStates > 2) hn::StoreU(state2, d, arrays.state[2] + i);
  StoreFloats<kParameter>(d, master, arrays.parameter + i);
}

// The last elements of a tile, fewer than a vector. They take the same path as
// all others, so that no result depends on where a tile ends: through vectors
// on the stack, because not every target can load and store under a mask
// without touching the bytes behind the array. The arguments are copies: if
// the caller's own had an address here, each of its fences would make it load
// them again.
template <class D, class Rule, DType kGradient, DType kParameter>
HWY_NOINLINE void UpdateTail(D d, Rule rule,
                             TileArrays<kGradient, kParameter> arrays,
                             size_t begin, size_t count, UndoSlot* undo,
                             size_t position) {
  constexpr size_t kLanes = hn::MaxLanes(d);
  HWY_ALIGN StorageOf<kGradient> gradient[kLanes] = {};
  HWY_ALIGN StorageOf<kParameter> parameter[kLanes];
  HWY_ALIGN float master[kLanes] = {};
  HWY_ALIGN float state[kMaxStateArrays][kLanes] = {};

  std::memcpy(gradient, arrays.gradient + begin, count * sizeof(gradient[0]));
  std::memcpy(master, arrays.master + begin, count * sizeof(float));
  for (int k = 0; k < Rule::kStateArrays; ++k) {
    std::memcpy(state[k], arrays.state[k] + begin, count * sizeof(float));
  }
  if (undo != nullptr) {
    std::memcpy(undo->old[0] + position, master, count * sizeof(float));
    for (int k = 0; k < Rule::kStateArrays; ++k) {
      std::memcpy(undo->old[1 + k] + position, state[k], count * sizeof(float));
    }
    PublishProgress(undo, UndoProgress(begin, position, count));
  }
  UpdateVector</*kUndo=*/false>(
      d, rule,
      TileArrays<kGradient, kParameter>{
          gradient, parameter, master, {state[0], state[1], state[2]}},
      0, nullptr, 0);
  std::memcpy(arrays.master + begin, master, count * sizeof(float));
  for (int k = 0; k < Rule::kStateArrays; ++k) {
    std::memcpy(arrays.state[k] + begin, state[k], count * sizeof(float));
  }
  std::memcpy(arrays.parameter + begin, parameter,
              count * sizeof(parameter[0]));
}

template <bool kUndo, class Rule, DType kGradient, DType kParameter>
HWY_INLINE void UpdateElements(const UpdateFactors& factors,
                               const TileView& view) {
  const Rule rule(factors);
  const TileArrays<kGradient, kParameter> arrays = {
      static_cast<const StorageOf<kGradient>*>(view.gradient),
      static_cast<StorageOf<kParameter>*>(view.parameter),
      view.master,
      {view.state[0], view.state[1], view.state[2]}};
  UndoSlot* const undo = view.undo;
  const size_t numel = view.numel;
  const hn::ScalableTag<float> d;
  static_assert(hn::MaxLanes(d) <= kUndoVectorElements);
  const size_t lanes = hn::Lanes(d);
  size_t i = view.begin;
  size_t position = 0;
  for (; i + lanes <= numel; i += lanes) {
    PrefetchInputs<Rule>(arrays, i + kPrefetchElements);
    UpdateVector<kUndo>(d, rule, arrays, i, undo, position);
    position ^= kUndoVectorElements;
  }
  if (i < numel) UpdateTail(d, rule, arrays, i, numel - i, undo, position);
}

// UpdateKernel::apply of a rule and a pair of dtypes.
template <class Rule, DType kGradient, DType kParameter>
void UpdateTile(const UpdateFactors& factors, const TileView& view) {
  if (view.undo == nullptr) {
    UpdateElements<false, Rule, kGradient, kParameter>(factors, view);
  } else {
    UpdateElements<true, Rule, kGradient, kParameter>(factors, view);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
