// The update of one vector of elements, or two, with the undo of old values.
// Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_UPDATE_VECTOR_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_UPDATE_VECTOR_INL_H_
#undef OPTSTATE_KERNELS_CPU_UPDATE_VECTOR_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_UPDATE_VECTOR_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/keep-inl.h"
#include "kernels/rules/elements-inl.h"
#include "kernels/rules/rule-inl.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The distance of the prefetch from the arithmetic. Square root and division
// fill the CPU's window with few elements, and the hardware's own prefetching
// stops at each page; README.md has what this gains.
inline constexpr size_t kPrefetchElements = 64;

// This is not a lambda: GCC 12 takes a lambda that only prefetches for one
// without effect.
template <class D>
HWY_INLINE void PrefetchElement(D d, const void* array, size_t element_bytes,
                                size_t i, size_t vector_bytes_min) {
  if (hn::Lanes(d) * element_bytes < vector_bytes_min) return;
  hwy::Prefetch(static_cast<const uint8_t*>(array) + i * element_bytes);
}

// Prefetches what UpdateVector(i) will read, of those arrays of which a vector
// has at least so many bytes. The address may lie behind the arrays, where a
// prefetch does no harm; with tiles it is the next one's beginning.
template <class Rule, class D, class Arrays>
HWY_INLINE void PrefetchInputs(D d, const Arrays& arrays, size_t i,
                               size_t vector_bytes_min = 0) {
  if (hn::Lanes(d) * arrays.GradientBytes() >= vector_bytes_min) {
    arrays.PrefetchGradient(i);
  }
  PrefetchElement(d, arrays.master, arrays.MasterBytes(), i, vector_bytes_min);
  if (arrays.ReadsParameter()) {
    PrefetchElement(d, arrays.parameter, arrays.ParameterBytes(), i,
                    vector_bytes_min);
  }
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!HasState<Rule>(k)) continue;
    PrefetchElement(d, arrays.state[k], arrays.StateBytes(), i,
                    vector_bytes_min);
  }
}

// Prefetches for the second vector of a pair what is not in the first one's
// line of the cache.
template <class Rule, class D, class Arrays>
HWY_INLINE void PrefetchSecondInputs(D d, const Arrays& arrays, size_t i) {
  constexpr size_t kLineBytes = 64;
  PrefetchInputs<Rule>(d, arrays, i, kLineBytes);
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

// Updates one whole vector of elements, from index `i` of `arrays` on. First
// the values that kKeep names go to `position` in `undo`, as element `number`
// of the view; undo.h says why in this order. Returns false when the vector
// does not have a plain form after all: then nothing is stored but in `undo`.
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

template <class Rule, int kState, class D, class Arrays, class V, class Bits>
HWY_INLINE void StoreStatePair(D d, const Arrays& arrays, size_t i, V first,
                               V second, Bits bits, Bits bits_b) {
  if constexpr (HasState<Rule>(kState)) {
    arrays.StoreState(d, first, kState, i, bits);
    arrays.StoreState(d, second, kState, i + hn::Lanes(d), bits_b);
  }
}

// Stores the states of two vectors with one progress: less to wait for between
// them. The order is array by array: memory takes neighbouring lines better.
template <class Rule, class D, class Arrays, class V>
HWY_INLINE void StoreStates(D d, const Arrays& arrays, size_t i, V state0,
                            V state0_b, V state1, V state1_b, V state2,
                            V state2_b) {
  const auto bits = arrays.StateBits(d, i);
  const auto bits_b = arrays.StateBits(d, i + hn::Lanes(d));
  StoreStatePair<Rule, 0>(d, arrays, i, state0, state0_b, bits, bits_b);
  StoreStatePair<Rule, 1>(d, arrays, i, state1, state1_b, bits, bits_b);
  StoreStatePair<Rule, 2>(d, arrays, i, state2, state2_b, bits, bits_b);
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

// Updates vectors where the plain form would not do, one by one. Away from the
// loop, and the arguments are copies: if the caller's own had an address here,
// each of its fences would make it load them again.
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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
