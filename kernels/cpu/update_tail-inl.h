// The rest of a tile behind its last whole vector. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_UPDATE_TAIL_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_UPDATE_TAIL_INL_H_
#undef OPTSTATE_KERNELS_CPU_UPDATE_TAIL_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_UPDATE_TAIL_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/keep-inl.h"
#include "kernels/cpu/update_vector-inl.h"
#include "kernels/rules/rule-inl.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline void CopyBytes(void* to, size_t to_offset, const void* from,
                      size_t from_offset, size_t count) {
  std::memcpy(static_cast<uint8_t*>(to) + to_offset,
              static_cast<const uint8_t*>(from) + from_offset, count);
}

// Updates the last elements of a tile, fewer than a vector. They take the same
// path as all others, so that no result depends on where a tile ends: through
// vectors on the stack, because not every target can load and store under a
// mask without touching the bytes behind the array. The arguments are copies,
// as in UpdateWithCare.
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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
