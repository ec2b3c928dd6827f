// The one walk over a tile that every update rule shares. Per-target include.
//
// A rule is the arithmetic on registers and nothing else:
//
//   struct Rule {
//     static constexpr uint32_t kStates;  // bit k: it has state array k
//     static constexpr uint32_t kSquares;  // bit k: ... which is never
//     negative static constexpr auto kPrepare = ...;  // UpdateKernel::prepare
//     static constexpr auto kAdvance = ...;  // UpdateKernel::advance, nullptr
//     explicit Rule(const UpdateFactors& factors);
//     // `grad` is summed, scaled and cut. Updates the others in place; those
//     // that it does not have are neither loaded nor stored.
//     template <class D, class V>
//     void operator()(D d, V grad, V& master, V& state0, V& state1,
//                     V& state2) const;
//   };
//
// Or, instead of operator(), its two halves, each in a plain form too that
// leaves out what NaN and infinities need:
//
//     // May the plain form be used with these factors? It must then make NaN
//     // of the new master wherever the other form gives anything else.
//     bool HasPlain() const;
//     // Each state array from its own old value, `grad` and the old master?
//     static constexpr bool kIsSeparable;
//     template <bool kPlain, class D, class V>
//     void UpdateStates(D d, V grad, V master, V& state0, V& state1,
//                       V& state2) const;
//     template <bool kPlain, class D, class V>  // of the new states
//     void UpdateMaster(D d, V& master, V state0, V state1, V state2) const;
//
// Vectors are passed one by one because those of a scalable instruction set
// (SVE) cannot be members of a struct or an array.

#if defined(OPTSTATE_KERNELS_CPU_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#undef OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/gradient_sum-inl.h"
#include "kernels/cpu/product-inl.h"
#include "kernels/cpu/tile_arrays-inl.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How far ahead of the arithmetic to fetch. Square root and division fill the
// CPU's window with few elements, and the hardware's own prefetching stops at
// each page; README.md has what this gains.
inline constexpr size_t kPrefetchElements = 64;

template <class Rule>
constexpr bool HasState(int k) {
  return (Rule::kStates >> k & 1) != 0;
}

template <class Rule>
constexpr bool HasHalves() {
  return requires { Rule::kIsSeparable; };
}

// What is kept of vectors that are overwritten: undo.h.
enum class Keep { kNothing, kOldValues, kXor };

template <class Rule, class Arrays>
constexpr Keep KeepOf() {
  if constexpr (HasHalves<Rule>() && Arrays::kHasFloatState) {
    if (Rule::kIsSeparable && Rule::kStates == 0b011) return Keep::kXor;
  }
  return Keep::kOldValues;
}

// Asks for what UpdateVector(i) will read. It may lie behind the arrays, where
// a prefetch does no harm; with tiles it is the next one's beginning.
template <class Rule, class Arrays>
HWY_INLINE void PrefetchInputs(const Arrays& arrays, size_t i) {
  arrays.PrefetchGradient(i);
  hwy::Prefetch(static_cast<const uint8_t*>(arrays.master) +
                i * arrays.MasterBytes());
  if (arrays.ReadsParameter()) {
    hwy::Prefetch(static_cast<const uint8_t*>(arrays.parameter) +
                  i * arrays.ParameterBytes());
  }
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (HasState<Rule>(k)) {
      hwy::Prefetch(static_cast<const uint8_t*>(arrays.state[k]) +
                    i * arrays.StateBytes());
    }
  }
}

// The gradient times the factor, cut to the limit; NaN stays NaN.
class GradientScale {
 public:
  explicit GradientScale(const UpdateFactors& factors)
      : factor_(factors.gradient_factor), limit_(factors.gradient_limit) {}

  bool HasPlain() const {
    return limit_ == std::numeric_limits<float>::infinity();
  }

  template <bool kPlain, class D, class V>
  HWY_INLINE V Scaled(D d, V gradient) const {
    const V scaled = Product(gradient, hn::Set(d, factor_));
    if constexpr (kPlain) return scaled;
    const V limit = hn::Set(d, limit_);
    return hn::IfThenElse(hn::Gt(hn::Abs(scaled), limit),
                          hn::CopySign(limit, scaled), scaled);
  }

 private:
  const float factor_;
  const float limit_;
};

// The vectors from index `i` of `arrays` on.
template <class Rule, class D, class Arrays, class V>
HWY_INLINE void LoadMasterAndStates(D d, const Arrays& arrays, size_t i,
                                    V& master, V& state0, V& state1,
                                    V& state2) {
  master = arrays.LoadMaster(d, i);
  state0 = state1 = state2 = hn::Zero(d);
  if constexpr (HasState<Rule>(0)) state0 = arrays.LoadState(d, 0, i);
  if constexpr (HasState<Rule>(1)) state1 = arrays.LoadState(d, 1, i);
  if constexpr (HasState<Rule>(2)) state2 = arrays.LoadState(d, 2, i);
}

template <class Rule, class D, class Arrays, class V>
HWY_INLINE void LoadInputs(D d, const Arrays& arrays, size_t i, V& gradient,
                           V& master, V& state0, V& state1, V& state2) {
  gradient = arrays.LoadGradient(d, i);
  LoadMasterAndStates<Rule>(d, arrays, i, master, state0, state1, state2);
}

template <class Rule, class D, class V>
HWY_INLINE void SaveOld(D d, UndoSlot* undo, size_t position, V master,
                        V state0, V state1, V state2) {
  auto& old = undo->old;
  hn::StoreU(master, d, old[0] + position);
  if constexpr (HasState<Rule>(0)) hn::StoreU(state0, d, old[1] + position);
  if constexpr (HasState<Rule>(1)) hn::StoreU(state1, d, old[2] + position);
  if constexpr (HasState<Rule>(2)) hn::StoreU(state2, d, old[3] + position);
}

template <class D, class V>
HWY_INLINE void SaveXor(D d, UndoSlot* undo, size_t position, V old_master,
                        V state0, V state1) {
  hn::StoreU(hn::Xor(hn::Xor(state0, state1), old_master), d,
             undo->old[0] + position);
}

// What LoadInputs gave, updated.
template <bool kPlain, class D, class Rule, class V>
HWY_INLINE void UpdateLoaded(D d, const GradientScale& scale, const Rule& rule,
                             V gradient, V& master, V& state0, V& state1,
                             V& state2) {
  const V scaled = scale.template Scaled<kPlain>(d, gradient);
  if constexpr (HasHalves<Rule>()) {
    rule.template UpdateStates<kPlain>(d, scaled, master, state0, state1,
                                       state2);
    rule.template UpdateMaster<kPlain>(d, master, state0, state1, state2);
  } else {
    rule(d, scaled, master, state0, state1, state2);
  }
}

template <bool kPlain, class Rule, class D, class Arrays, class V>
HWY_INLINE void StoreAll(D d, const Arrays& arrays, size_t i, V master,
                         V state0, V state1, V state2) {
  arrays.template StoreMaster<kPlain>(d, master, i);
  if constexpr (HasState<Rule>(0)) arrays.StoreState(d, state0, 0, i);
  if constexpr (HasState<Rule>(1)) arrays.StoreState(d, state1, 1, i);
  if constexpr (HasState<Rule>(2)) arrays.StoreState(d, state2, 2, i);
}

// One whole vector of elements, from index `i` of `arrays` on. What kKeep says
// goes to `position` in `undo` first, as element `number` of the view; undo.h
// says why in this order. False when it does not have a plain form after all:
// then nothing is stored but in `undo`.
template <bool kPlain, Keep kKeep, class D, class Rule, class Arrays>
HWY_INLINE bool UpdateVector(D d, const GradientScale& scale, const Rule& rule,
                             const Arrays& arrays, size_t i, UndoSlot* undo,
                             size_t number, size_t position) {
  static_assert(kKeep != Keep::kXor);
  hn::Vec<D> gradient, master, state0, state1, state2;
  LoadInputs<Rule>(d, arrays, i, gradient, master, state0, state1, state2);
  if constexpr (kKeep == Keep::kOldValues) {
    SaveOld<Rule>(d, undo, position, master, state0, state1, state2);
    PublishProgress(undo, UndoProgress(number, position, hn::Lanes(d)));
  }
  UpdateLoaded<kPlain>(d, scale, rule, gradient, master, state0, state1,
                       state2);
  if constexpr (kPlain) {
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(master)))) return false;
  }
  StoreAll<kPlain, Rule>(d, arrays, i, master, state0, state1, state2);
  return true;
}

template <class Rule, int kState, class D, class Arrays, class V>
HWY_INLINE void StoreStatePair(D d, const Arrays& arrays, size_t i, V first,
                               V second) {
  if constexpr (HasState<Rule>(kState)) {
    arrays.StoreState(d, first, kState, i);
    arrays.StoreState(d, second, kState, i + hn::Lanes(d));
  }
}

// Two vectors with one progress: less to wait for between them. Array by array:
// memory takes lines that are neighbours better.
template <class Rule, class D, class Arrays, class V>
HWY_INLINE void StoreStates(D d, const Arrays& arrays, size_t i, V state0,
                            V state0_b, V state1, V state1_b, V state2,
                            V state2_b) {
  StoreStatePair<Rule, 0>(d, arrays, i, state0, state0_b);
  StoreStatePair<Rule, 1>(d, arrays, i, state1, state1_b);
  StoreStatePair<Rule, 2>(d, arrays, i, state2, state2_b);
}

template <Keep kKeep, class D, class Rule, class Arrays>
HWY_INLINE void UpdatePair(D d, const GradientScale& scale, const Rule& rule,
                           const Arrays& arrays, size_t i, UndoSlot* undo,
                           size_t number, size_t position) {
  static_assert(kKeep != Keep::kXor);
  const size_t lanes = hn::Lanes(d);
  hn::Vec<D> gradient, master, state0, state1, state2;
  hn::Vec<D> gradient_b, master_b, state0_b, state1_b, state2_b;
  arrays.LoadGradientPair(d, i, gradient, gradient_b);
  LoadMasterAndStates<Rule>(d, arrays, i, master, state0, state1, state2);
  LoadMasterAndStates<Rule>(d, arrays, i + lanes, master_b, state0_b, state1_b,
                            state2_b);
  if constexpr (kKeep == Keep::kOldValues) {
    SaveOld<Rule>(d, undo, position, master, state0, state1, state2);
    SaveOld<Rule>(d, undo, position + lanes, master_b, state0_b, state1_b,
                  state2_b);
    PublishProgress(undo, UndoProgress(number, position, 2 * lanes));
  }
  UpdateLoaded<false>(d, scale, rule, gradient, master, state0, state1, state2);
  UpdateLoaded<false>(d, scale, rule, gradient_b, master_b, state0_b, state1_b,
                      state2_b);
  arrays.StoreMaster(d, master, i);
  arrays.StoreMaster(d, master_b, i + lanes);
  StoreStates<Rule>(d, arrays, i, state0, state0_b, state1, state1_b, state2,
                    state2_b);
}

// The new states of one vector whose gradient was loaded, and its old master.
template <Keep kKeep, class D, class Rule, class Arrays, class V>
HWY_INLINE void BeginLoaded(D d, const GradientScale& scale, const Rule& rule,
                            UndoSlot* undo, size_t position, V gradient,
                            V master, V& state0, V& state1, V& state2) {
  if constexpr (kKeep == Keep::kOldValues) {
    SaveOld<Rule>(d, undo, position, master, state0, state1, state2);
  }
  rule.template UpdateStates<true>(d, scale.template Scaled<true>(d, gradient),
                                   master, state0, state1, state2);
}

// The same of one that was not.
template <Keep kKeep, class D, class Rule, class Arrays, class V>
HWY_INLINE void BeginVector(D d, const GradientScale& scale, const Rule& rule,
                            const Arrays& arrays, size_t i, UndoSlot* undo,
                            size_t position, V& master, V& state0, V& state1,
                            V& state2) {
  PrefetchInputs<Rule>(arrays, i + kPrefetchElements);
  V gradient;
  LoadInputs<Rule>(d, arrays, i, gradient, master, state0, state1, state2);
  BeginLoaded<kKeep, D, Rule, Arrays>(d, scale, rule, undo, position, gradient,
                                      master, state0, state1, state2);
}

template <Keep kKeep, class D, class Rule, class Arrays, class V>
HWY_INLINE void BeginPair(D d, const GradientScale& scale, const Rule& rule,
                          const Arrays& arrays, size_t i, UndoSlot* undo,
                          size_t position, V& master, V& state0, V& state1,
                          V& state2, V& master_b, V& state0_b, V& state1_b,
                          V& state2_b) {
  const size_t lanes = hn::Lanes(d);
  if constexpr (Arrays::kSums) {
    V gradient, gradient_b;
    arrays.LoadGradientPair(d, i, gradient, gradient_b);
    PrefetchInputs<Rule>(arrays, i + kPrefetchElements);
    LoadMasterAndStates<Rule>(d, arrays, i, master, state0, state1, state2);
    BeginLoaded<kKeep, D, Rule, Arrays>(d, scale, rule, undo, position,
                                        gradient, master, state0, state1,
                                        state2);
    PrefetchInputs<Rule>(arrays, i + lanes + kPrefetchElements);
    LoadMasterAndStates<Rule>(d, arrays, i + lanes, master_b, state0_b,
                              state1_b, state2_b);
    BeginLoaded<kKeep, D, Rule, Arrays>(d, scale, rule, undo, position + lanes,
                                        gradient_b, master_b, state0_b,
                                        state1_b, state2_b);
  } else {
    BeginVector<kKeep>(d, scale, rule, arrays, i, undo, position, master,
                       state0, state1, state2);
    BeginVector<kKeep>(d, scale, rule, arrays, i + lanes, undo,
                       position + lanes, master_b, state0_b, state1_b,
                       state2_b);
  }
}

template <Keep kKeep>
constexpr Keep KeepOfOne() {
  return kKeep == Keep::kXor ? Keep::kOldValues : kKeep;
}

// Vectors where the plain form would not do, one by one. Away from the loop,
// and the arguments are copies: if the caller's own had an address here, each
// of its fences would make it load them again.
template <Keep kKeep, class D, class Rule, class Arrays>
HWY_NOINLINE void UpdateWithCare(D d, GradientScale scale, Rule rule,
                                 Arrays arrays, size_t begin, size_t end,
                                 UndoSlot* undo, size_t number,
                                 size_t position) {
  for (size_t i = begin; i < end; i += hn::Lanes(d)) {
    const size_t done = i - begin;
    UpdateVector<false, kKeep>(d, scale, rule, arrays, i, undo, number + done,
                               position + done);
  }
}

inline void CopyBytes(void* to, size_t to_offset, const void* from,
                      size_t from_offset, size_t count) {
  std::memcpy(static_cast<uint8_t*>(to) + to_offset,
              static_cast<const uint8_t*>(from) + from_offset, count);
}

// The last elements of a tile, fewer than a vector. They take the same path as
// all others, so that no result depends on where a tile ends: through vectors
// on the stack, because not every target can load and store under a mask
// without touching the bytes behind the array. The arguments are copies, as in
// UpdateWithCare.
template <class D, class Rule, class Arrays>
HWY_NOINLINE void UpdateTail(D d, GradientScale scale, Rule rule, Arrays arrays,
                             size_t begin, size_t count, UndoSlot* undo,
                             size_t number, size_t position) {
  constexpr size_t kLanes = hn::MaxLanes(d);
  HWY_ALIGN float gradient[kLanes] = {};
  HWY_ALIGN float parameter[kLanes] = {};  // enough for every dtype
  HWY_ALIGN float master[kLanes] = {};
  HWY_ALIGN float state[kStateArraysMax][kLanes] = {};
  const size_t parameter_bytes = arrays.ParameterBytes();
  const size_t master_bytes = arrays.MasterBytes();
  const size_t state_bytes = arrays.StateBytes();

  arrays.GatherGradient(begin, count, gradient);
  CopyBytes(master, 0, arrays.master, begin * master_bytes,
            count * master_bytes);
  if (arrays.ReadsParameter()) {
    CopyBytes(parameter, 0, arrays.parameter, begin * parameter_bytes,
              count * parameter_bytes);
  }
  const void* const its_gradient = gradient;
  auto tail = arrays.WithGradient(&its_gradient);
  tail.parameter = parameter;
  tail.master = master;
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!HasState<Rule>(k)) continue;
    CopyBytes(state[k], 0, arrays.state[k], begin * state_bytes,
              count * state_bytes);
    tail.state[k] = state[k];
  }
  tail.MoveFlat(begin);
  if (undo != nullptr) {
    hn::StoreU(tail.LoadMaster(d, 0), d, undo->old[0] + position);
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!HasState<Rule>(k)) continue;
      hn::StoreU(tail.LoadState(d, k, 0), d, undo->old[1 + k] + position);
    }
    PublishProgress(undo, UndoProgress(number, position, count));
  }
  UpdateVector</*kPlain=*/false, Keep::kNothing>(d, scale, rule, tail, 0,
                                                 nullptr, 0, 0);
  CopyBytes(arrays.master, begin * master_bytes, master, 0,
            count * master_bytes);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!HasState<Rule>(k)) continue;
    CopyBytes(arrays.state[k], begin * state_bytes, state[k], 0,
              count * state_bytes);
  }
  if (!arrays.HasOwnParameter()) return;
  CopyBytes(arrays.parameter, begin * parameter_bytes, parameter, 0,
            count * parameter_bytes);
}

// Pairs of vectors from `i` on, in plain form, as long as there is a whole one;
// returns where they end. The masters of one pair and the states of the next
// are in hand at a time: square root and division take longer than all else,
// and so the next pair's are never waited for behind this one's stores.
template <Keep kKeep, class D, class Rule, class Arrays>
HWY_INLINE size_t UpdatePlainPairs(D d, const GradientScale& scale,
                                   const Rule& rule, const Arrays& arrays,
                                   size_t i, size_t end, size_t number,
                                   UndoSlot* undo, size_t* its_position) {
  const size_t lanes = hn::Lanes(d);
  const size_t pair = 2 * lanes;
  if (i + pair > end) return i;
  size_t position = *its_position;
  hn::Vec<D> master, state0, state1, state2;
  hn::Vec<D> master_b, state0_b, state1_b, state2_b;
  BeginPair<kKeep>(d, scale, rule, arrays, i, undo, position, master, state0,
                   state1, state2, master_b, state0_b, state1_b, state2_b);
  while (true) {
    const auto publish = [&](UndoPhase phase) HWY_ATTR {
      PublishProgress(undo, UndoProgress(number + i, position, pair, phase));
    };
    // From here on the other position is free.
    if constexpr (kKeep == Keep::kOldValues) publish(UndoPhase::kOldValues);
    hn::Vec<D> new_master = master;
    hn::Vec<D> new_master_b = master_b;
    rule.template UpdateMaster<true>(d, new_master, state0, state1, state2);
    rule.template UpdateMaster<true>(d, new_master_b, state0_b, state1_b,
                                     state2_b);

    const bool is_last = i + 2 * pair > end;
    // The last one begins itself once more, in vain.
    const size_t next = is_last ? i : i + pair;
    const size_t next_position = position ^ kUndoVectorElements;
    hn::Vec<D> next_master, next0, next1, next2;
    hn::Vec<D> next_master_b, next0_b, next1_b, next2_b;
    BeginPair<kKeep>(d, scale, rule, arrays, next, undo, next_position,
                     next_master, next0, next1, next2, next_master_b, next0_b,
                     next1_b, next2_b);

    // NaN of either goes through; two infinities are asked for in vain.
    const auto has_nan = hn::IsNaN(hn::Add(new_master, new_master_b));
    if (HWY_UNLIKELY(!hn::AllFalse(d, has_nan))) {
      UpdateWithCare<KeepOfOne<kKeep>()>(d, scale, rule, arrays, i, i + pair,
                                         undo, number + i, position);
    } else if constexpr (kKeep == Keep::kXor) {
      SaveXor(d, undo, position, master, state0, state1);
      SaveXor(d, undo, position + lanes, master_b, state0_b, state1_b);
      publish(UndoPhase::kState0);
      StoreStatePair<Rule, 0>(d, arrays, i, state0, state0_b);
      publish(UndoPhase::kState1);
      StoreStatePair<Rule, 1>(d, arrays, i, state1, state1_b);
      publish(UndoPhase::kMaster);
      arrays.StorePlainMasters(d, new_master, new_master_b, i);
    } else {
      arrays.StorePlainMasters(d, new_master, new_master_b, i);
      StoreStates<Rule>(d, arrays, i, state0, state0_b, state1, state1_b,
                        state2, state2_b);
    }
    i += pair;
    position = next_position;
    if (is_last) break;
    master = next_master;
    state0 = next0;
    state1 = next1;
    state2 = next2;
    master_b = next_master_b;
    state0_b = next0_b;
    state1_b = next1_b;
    state2_b = next2_b;
  }
  *its_position = position;
  return i;
}

// Elements [begin, end) of `arrays`, whose element 0 is `number` in the view.
template <bool kPlain, Keep kKeep, class Rule, class Arrays>
HWY_NOINLINE void UpdateVectors(const GradientScale& its_scale,
                                const Rule& its_rule, Arrays arrays,
                                size_t begin, size_t end, size_t number,
                                UndoSlot* undo) {
  // Copies without an address, as in UpdateWithCare.
  const GradientScale scale = its_scale;
  const Rule rule = its_rule;
  const hn::ScalableTag<float> d;
  static_assert(hn::MaxLanes(d) <= kUndoVectorElements);
  const size_t lanes = hn::Lanes(d);
  size_t i = begin;
  size_t position = 0;
  // A scalable vector may be too long for two, but none that was built yet.
  if (!HWY_HAVE_SCALABLE || 2 * lanes <= kUndoVectorElements) {
    if constexpr (kPlain) {
      i = UpdatePlainPairs<kKeep>(d, scale, rule, arrays, i, end, number, undo,
                                  &position);
    } else if constexpr (!HasHalves<Rule>()) {
      for (; i + 2 * lanes <= end; i += 2 * lanes) {
        PrefetchInputs<Rule>(arrays, i + kPrefetchElements);
        PrefetchInputs<Rule>(arrays, i + lanes + kPrefetchElements);
        UpdatePair<kKeep>(d, scale, rule, arrays, i, undo, number + i,
                          position);
        position ^= kUndoVectorElements;
      }
    }
  }
  constexpr Keep kKeepOfOne = KeepOfOne<kKeep>();
  for (; i + lanes <= end; i += lanes) {
    PrefetchInputs<Rule>(arrays, i + kPrefetchElements);
    if (!UpdateVector<kPlain, kKeepOfOne>(d, scale, rule, arrays, i, undo,
                                          number + i, position)) {
      UpdateWithCare<kKeepOfOne>(d, scale, rule, arrays, i, i + lanes, undo,
                                 number + i, position);
    }
    position ^= kUndoVectorElements;
  }
  if (i < end) {
    UpdateTail(d, scale, rule, arrays, i, end - i, undo, number + i, position);
  }
}

template <Keep kKeep, class Rule, class Arrays>
void UpdateKeeping(const UpdateFactors& factors, const Arrays& arrays,
                   size_t begin, size_t end, size_t number, UndoSlot* undo) {
  const GradientScale scale(factors);
  const Rule rule(factors);
  if constexpr (HasHalves<Rule>()) {
    if (scale.HasPlain() && rule.HasPlain()) {
      return UpdateVectors<true, kKeep>(scale, rule, arrays, begin, end, number,
                                        undo);
    }
  }
  UpdateVectors<false, KeepOfOne<kKeep>()>(scale, rule, arrays, begin, end,
                                           number, undo);
}

template <class Rule, class Arrays>
void UpdateRange(const UpdateFactors& factors, const Arrays& arrays,
                 size_t begin, size_t end, size_t number, UndoSlot* undo) {
  if (undo == nullptr) {
    UpdateKeeping<Keep::kNothing, Rule>(factors, arrays, begin, end, number,
                                        undo);
  } else {
    UpdateKeeping<KeepOf<Rule, Arrays>(), Rule>(factors, arrays, begin, end,
                                                number, undo);
  }
}

inline TileArrays ArraysOf(const TileView& view) {
  return {view.parameter,
          view.master,
          {view.state[0], view.state[1], view.state[2]}};
}

inline GradientSum SumOf(const TileView& view, DType gradient) {
  return {view.gradients.data(), view.gradients.size(), gradient, 0};
}

// Calls update(arrays) with those of the view that know their dtypes.
template <DType kGradient, DType kParameter, MasterFormat kMaster, class Update>
HWY_INLINE void WithFixedArrays(const TileView& view, const Update& update) {
  if (view.gradients.size() == 1) {
    return update(FixedArrays<kGradient, kParameter, kMaster>{
        ArraysOf(view), view.gradients[0]});
  }
  update(SumArrays<kParameter, kMaster>{{ArraysOf(view), nullptr},
                                        SumOf(view, kGradient)});
}

// The vectors that somebody who was killed kept the xor of (undo.h), finished
// in the order of UpdatePair. Returns the first element that is not updated.
template <class Rule, class Arrays>
HWY_NOINLINE size_t FinishXor(const UpdateFactors& factors,
                              const TileView& view, DType gradient_dtype,
                              const Arrays& arrays) {
  const auto [begin, position, length, phase] =
      InFlightOf(view.undo->progress.load(std::memory_order_relaxed));
  if (phase == UndoPhase::kOldValues) return view.begin;
  HWY_ALIGN float gradient[kUndoRingElements] = {};
  HWY_ALIGN float parameter[kUndoRingElements] = {};  // enough for every dtype
  HWY_ALIGN float master[kUndoRingElements] = {};
  HWY_ALIGN float state[2][kUndoRingElements] = {};
  HWY_ALIGN float kept[kUndoRingElements] = {};
  const size_t parameter_bytes = arrays.ParameterBytes();
  const size_t master_bytes = arrays.MasterBytes();
  SumOf(view, gradient_dtype).Gather(begin, length, gradient);
  CopyBytes(kept, 0, view.undo->old[0] + position, 0, length * sizeof(float));
  if (arrays.ReadsParameter()) {
    CopyBytes(parameter, 0, arrays.parameter, begin * parameter_bytes,
              length * parameter_bytes);
  }
  CopyBytes(master, 0, arrays.master, begin * master_bytes,
            length * master_bytes);
  for (int k = 0; k < 2; ++k) {
    CopyBytes(state[k], 0, arrays.state[k], begin * sizeof(float),
              length * sizeof(float));
  }
  Arrays copy = arrays;
  copy.gradient = gradient;
  copy.parameter = parameter;
  copy.master = master;
  copy.state[0] = state[0];
  copy.state[1] = state[1];

  const Rule rule(factors);
  const GradientScale scale(factors);
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  for (size_t i = 0; i < length; i += hn::Lanes(d)) {
    hn::Vec<decltype(d)> raw, old, state0, state1, state2;
    LoadInputs<Rule>(d, copy, i, raw, old, state0, state1, state2);
    const auto its_xor = hn::LoadU(d, kept + i);
    if (phase == UndoPhase::kState0) {
      auto new0 = state0;
      rule.template UpdateStates<false>(d, scale.template Scaled<false>(d, raw),
                                        old, new0, state1, state2);
      const auto stored = hn::Xor(its_xor, hn::Xor(state1, old));
      // Compared, not taken: if somebody wrote to the gradients since, this is
      // no value that a state ever had.
      const auto is_new = hn::RebindMask(
          d, hn::Eq(hn::BitCast(du, state0), hn::BitCast(du, stored)));
      state0 = hn::IfThenElse(is_new, state0, new0);
    } else if (phase == UndoPhase::kState1) {
      state1 = hn::Xor(its_xor, hn::Xor(state0, old));
    } else {
      old = hn::Xor(its_xor, hn::Xor(state0, state1));
    }
    rule.template UpdateMaster<false>(d, old, state0, state1, state2);
    StoreAll<false, Rule>(d, copy, i, old, state0, state1, state2);
  }

  const auto publish = [&, begin = begin, position = position,
                        length = length](UndoPhase next) {
    PublishProgress(view.undo, UndoProgress(begin, position, length, next));
  };
  const auto copy_state = [&, begin = begin, length = length](int k) {
    CopyBytes(arrays.state[k], begin * sizeof(float), state[k], 0,
              length * sizeof(float));
  };
  if (phase == UndoPhase::kState0) {
    copy_state(0);
    publish(UndoPhase::kState1);
  }
  if (phase != UndoPhase::kMaster) {
    copy_state(1);
    publish(UndoPhase::kMaster);
  }
  CopyBytes(arrays.master, begin * master_bytes, master, 0,
            length * master_bytes);
  if (arrays.HasOwnParameter()) {
    CopyBytes(arrays.parameter, begin * parameter_bytes, parameter, 0,
              length * parameter_bytes);
  }
  PublishProgress(view.undo, UndoProgress(begin + length));
  return begin + length;
}

// UpdateKernel::apply of a rule and a pair of dtypes.
template <class Rule, DType kGradient, DType kParameter, MasterFormat kMaster>
void UpdateFixed(const UpdateFactors& factors, const TileView& view) {
  using OfFloats = FixedArrays<DType::kFloat32, kParameter, kMaster>;
  size_t begin = view.begin;
  if constexpr (KeepOf<Rule, OfFloats>() == Keep::kXor) {
    if (view.undo != nullptr) {
      begin = FinishXor<Rule>(factors, view, kGradient,
                              OfFloats{ArraysOf(view), nullptr});
    }
  }
  WithFixedArrays<kGradient, kParameter, kMaster>(
      view, [&](const auto& arrays) HWY_ATTR {
        UpdateRange<Rule>(factors, arrays, begin, view.numel, 0, view.undo);
      });
}

inline AnyArrays ArraysOf(const TileView& view, DType gradient, DType parameter,
                          StateFormat state, MasterFormat master,
                          uint32_t random_seed) {
  return {ArraysOf(view),
          SumOf(view, gradient),
          parameter,
          state,
          master,
          view.flat_begin,
          RandomKeysOf(random_seed, view.flat_begin)};
}

template <class Rule>
HWY_NOINLINE void UpdateOfFormats(const UpdateFactors& factors,
                                  const TileView& view, DType gradient,
                                  DType parameter, StateFormat state,
                                  MasterFormat master) {
  UpdateRange<Rule>(
      factors,
      ArraysOf(view, gradient, parameter, state, master, factors.random_seed),
      view.begin, view.numel, 0, view.undo);
}

// UpdateKernel::apply of a rule with state arrays of float or bfloat16.
template <class Rule, DType kGradient, DType kParameter, MasterFormat kMaster,
          StateFormat kState>
void UpdateAny(const UpdateFactors& factors, const TileView& view) {
  UpdateOfFormats<Rule>(factors, view, kGradient, kParameter, kState, kMaster);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
