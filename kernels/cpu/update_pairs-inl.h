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

#include "hwy/highway.h"
#include "kernels/cpu/rule-inl.h"
#include "kernels/cpu/update_vector-inl.h"
#include "kernels/undo.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class V>
HWY_INLINE void SaveXor(D d, UndoSlot* undo, size_t position, V old_master,
                        V state0, V state1) {
  hn::StoreU(hn::Xor(hn::Xor(state0, state1), old_master), d,
             undo->old[0] + position);
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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
