// The completion of what a killed kernel that keeps a xor had in flight.
// Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_FINISH_XOR_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_FINISH_XOR_INL_H_
#undef OPTSTATE_KERNELS_CPU_FINISH_XOR_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_FINISH_XOR_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/cpu/tile_arrays-inl.h"
#include "kernels/cpu/update_tail-inl.h"
#include "kernels/cpu/update_vector-inl.h"
#include "kernels/rules/rule-inl.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Finishes the vectors of which a killed process kept the xor (undo.h), in the
// order of UpdatePair. Returns the first element that is not updated.
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
      // The value is compared, not used: if the gradients were overwritten
      // since, the state never had this value.
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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
