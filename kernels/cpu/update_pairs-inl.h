// The loop over pairs of vectors in plain form (rule-inl.h), where undo may be
// a xor. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_UPDATE_PAIRS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_UPDATE_PAIRS_INL_H_
#undef OPTSTATE_KERNELS_CPU_UPDATE_PAIRS_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_UPDATE_PAIRS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/keep-inl.h"
#include "kernels/cpu/update_vector-inl.h"
#include "kernels/rules/rule-inl.h"
#include "kernels/undo.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Computes the new states of one vector whose gradient was loaded.
template <Keep kKeep, class D, class Rule, class Arrays, class V>
HWY_INLINE void BeginLoaded(D d, const GradientScale& scale, const Rule& rule,
                            const Arrays& arrays, size_t i, UndoSlot* undo,
                            size_t position, V gradient, V& state0, V& state1,
                            V& state2) {
  V master;
  LoadMasterAndStates<Rule>(d, arrays, i, master, state0, state1, state2);
  if constexpr (kKeep == Keep::kOldValues) {
    SaveOld<Rule>(d, undo, position, master, state0, state1, state2);
  }
  rule.template UpdateStates<true>(d, scale.template Scaled<true>(d, gradient),
                                   master, state0, state1, state2);
}

// Computes the new states of two vectors, from index `i` of `arrays` on.
template <Keep kKeep, class D, class Rule, class Arrays, class V>
HWY_INLINE void BeginPair(D d, const GradientScale& scale, const Rule& rule,
                          const Arrays& arrays, size_t i, UndoSlot* undo,
                          size_t position, V& state0, V& state1, V& state2,
                          V& state0_b, V& state1_b, V& state2_b) {
  const size_t lanes = hn::Lanes(d);
  V gradient, gradient_b;
  if constexpr (Arrays::kSums) {
    arrays.LoadGradientPair(d, i, gradient, gradient_b);
  }
  PrefetchInputs<Rule>(d, arrays, i + kPrefetchElements);
  if constexpr (!Arrays::kSums) gradient = arrays.LoadGradient(d, i);
  BeginLoaded<kKeep>(d, scale, rule, arrays, i, undo, position, gradient,
                     state0, state1, state2);
  PrefetchSecondInputs<Rule>(d, arrays, i + lanes + kPrefetchElements);
  if constexpr (!Arrays::kSums) gradient_b = arrays.LoadGradient(d, i + lanes);
  BeginLoaded<kKeep>(d, scale, rule, arrays, i + lanes, undo, position + lanes,
                     gradient_b, state0_b, state1_b, state2_b);
}

// Computes the masters of two vectors. They are loaded once more, rather than
// kept since BeginPair: there are targets with 16 registers.
template <class D, class Rule, class Arrays, class V>
HWY_INLINE void UpdateMasters(D d, const Rule& rule, const Arrays& arrays,
                              size_t i, V state0, V state1, V state2,
                              V state0_b, V state1_b, V state2_b, V& master,
                              V& master_b) {
  master = arrays.LoadMaster(d, i);
  master_b = arrays.LoadMaster(d, i + hn::Lanes(d));
  rule.template UpdateMaster<true>(d, master, state0, state1, state2);
  rule.template UpdateMaster<true>(d, master_b, state0_b, state1_b, state2_b);
}

// Stores the xor of a vector whose master is still the old one.
template <class D, class Arrays, class V>
HWY_INLINE void SaveXor(D d, const Arrays& arrays, size_t i, float* kept,
                        V state0, V state1) {
  hn::StoreU(hn::Xor(hn::Xor(state0, state1), arrays.LoadMaster(d, i)), d,
             kept);
}

// Updates a whole pair, unless a master is NaN: then the pair is done again
// with care. `progress` is the pair's, and position_bytes its position in
// `undo`.
template <Keep kKeep, class D, class Rule, class Arrays, class V>
HWY_INLINE void EndPair(D d, const GradientScale& scale, const Rule& rule,
                        const Arrays& arrays, size_t i, UndoSlot* undo,
                        size_t number, size_t position_bytes, uint64_t progress,
                        V master, V state0, V state1, V state2, V master_b,
                        V state0_b, V state1_b, V state2_b) {
  const size_t lanes = hn::Lanes(d);
  // A NaN of either goes through; for two infinities the question is asked in
  // vain.
  const auto has_nan = hn::IsNaN(hn::Add(master, master_b));
  if (HWY_UNLIKELY(!hn::AllFalse(d, has_nan))) {
    UpdateWithCare<KeepOfOne<kKeep>()>(d, scale, rule, arrays, i, i + 2 * lanes,
                                       undo, number + i,
                                       position_bytes / sizeof(float));
  } else if constexpr (kKeep == Keep::kXor) {
    auto* const kept = reinterpret_cast<float*>(
        reinterpret_cast<uint8_t*>(undo->old[0]) + position_bytes);
    SaveXor(d, arrays, i, kept, state0, state1);
    SaveXor(d, arrays, i + lanes, kept + lanes, state0_b, state1_b);
    PublishProgress(undo, progress);
    constexpr NoStateBits kNoBits;  // a xor is of state in floats
    StoreStatePair<Rule, 0>(d, arrays, i, state0, state0_b, kNoBits, kNoBits);
    PublishPhase(undo, UndoPhase::kState1);
    StoreStatePair<Rule, 1>(d, arrays, i, state1, state1_b, kNoBits, kNoBits);
    PublishPhase(undo, UndoPhase::kMaster);
    arrays.StorePlainMasters(d, master, master_b, i);
  } else {
    arrays.StorePlainMasters(d, master, master_b, i);
    StoreStates<Rule>(d, arrays, i, state0, state0_b, state1, state1_b, state2,
                      state2_b);
  }
}

// Updates pairs of vectors from `i` on, in plain form, as long as there is a
// whole one; returns where they end. The masters of one pair and the states of
// the next are in hand at a time: square root and division take longer than all
// else, and so the next pair's are never waited for behind this one's stores.
// Every instruction counts where the CPU's window is full: README.md has what
// each costs.
template <Keep kKeep, class D, class Rule, class Arrays>
HWY_INLINE size_t UpdatePlainPairs(D d, const GradientScale& scale,
                                   const Rule& rule, const Arrays& arrays,
                                   size_t i, size_t end, size_t number,
                                   UndoSlot* undo, size_t* its_position) {
  const size_t pair = 2 * hn::Lanes(d);
  if (i + pair > end) return i;
  // This distance is in bytes, which cost no instruction to address with.
  constexpr size_t kOtherPosition = kUndoVectorElements * sizeof(float);
  size_t position = *its_position * sizeof(float);
  uint64_t progress = UndoProgress(
      number + i, *its_position, pair,
      kKeep == Keep::kXor ? UndoPhase::kState0 : UndoPhase::kOldValues);
  hn::Vec<D> master, state0, state1, state2;
  hn::Vec<D> master_b, state0_b, state1_b, state2_b;
  BeginPair<kKeep>(d, scale, rule, arrays, i, undo, *its_position, state0,
                   state1, state2, state0_b, state1_b, state2_b);
  for (; i + 2 * pair <= end; i += pair) {
    // From here on the other position is free.
    if constexpr (kKeep == Keep::kOldValues) PublishProgress(undo, progress);
    UpdateMasters(d, rule, arrays, i, state0, state1, state2, state0_b,
                  state1_b, state2_b, master, master_b);
    hn::Vec<D> next0, next1, next2, next0_b, next1_b, next2_b;
    BeginPair<kKeep>(d, scale, rule, arrays, i + pair, undo,
                     (position ^ kOtherPosition) / sizeof(float), next0, next1,
                     next2, next0_b, next1_b, next2_b);
    EndPair<kKeep>(d, scale, rule, arrays, i, undo, number, position, progress,
                   master, state0, state1, state2, master_b, state0_b, state1_b,
                   state2_b);
    progress = NextUndoProgress(progress, pair);
    position ^= kOtherPosition;
    state0 = next0;
    state1 = next1;
    state2 = next2;
    state0_b = next0_b;
    state1_b = next1_b;
    state2_b = next2_b;
  }
  if constexpr (kKeep == Keep::kOldValues) PublishProgress(undo, progress);
  UpdateMasters(d, rule, arrays, i, state0, state1, state2, state0_b, state1_b,
                state2_b, master, master_b);
  EndPair<kKeep>(d, scale, rule, arrays, i, undo, number, position, progress,
                 master, state0, state1, state2, master_b, state0_b, state1_b,
                 state2_b);
  *its_position = (position ^ kOtherPosition) / sizeof(float);
  return i + pair;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
