// The elements of a tile: loaded as floats, stored in their formats. Per-target
// include.

#if defined(OPTSTATE_KERNELS_RULES_ELEMENTS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_ELEMENTS_INL_H_
#undef OPTSTATE_KERNELS_RULES_ELEMENTS_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_ELEMENTS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "kernels/ops/float16-inl.h"
#include "kernels/ops/split_master-inl.h"
#include "kernels/ops/stochastic-inl.h"
#include "kernels/rules/rule-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// The addresses that all classes of elements have. Elements are counted from
// the pointers.
struct TileArrays {
  void* parameter;
  void* master;
  void* state[kStateArraysMax];
};

// Elements whose formats are asked for at each access. State arrays are of
// float or bfloat16.
struct AnyElements : TileArrays {
  DType parameter_dtype;
  StateFormat state_format;
  MasterFormat master_format;
  uint64_t flat;  // of element 0, as in TileView
  RandomKeys random;

  template <class D>
  OPTSTATE_OP ops::Vec<D> LoadMaster(D d, size_t i) const {
    if (master_format == MasterFormat::kSplit) {
      return LoadSplit(d, static_cast<const uint16_t*>(parameter) + i,
                       static_cast<const uint16_t*>(master) + i);
    }
    return ops::LoadU(d, static_cast<const float*>(master) + i);
  }

  template <class D>
  OPTSTATE_OP ops::Vec<D> LoadState(D d, int k, size_t i) const {
    if (state_format == StateFormat::kFloat32) {
      return ops::LoadU(d, static_cast<const float*>(state[k]) + i);
    }
    return LoadFloats<DType::kBFloat16>(
        d, static_cast<const uint16_t*>(state[k]) + i);
  }

  // Returns the random bits of arrays 0 and 1, which share them.
  template <class D>
  OPTSTATE_OP ops::Vec<ops::RebindToUnsigned<D>> StateBits(D d,
                                                           size_t i) const {
    if (state_format == StateFormat::kFloat32) {
      return ops::Zero(ops::RebindToUnsigned<D>());
    }
    return RandomVector(d, random, RandomStreamOf(0), flat + i);
  }
  template <class D, class V, class VU>
  OPTSTATE_OP void StoreState(D d, V v, int k, size_t i, VU bits) const {
    if (state_format == StateFormat::kFloat32) {
      return ops::StoreU(v, d, static_cast<float*>(state[k]) + i);
    }
    if (RandomStreamOf(k) != RandomStreamOf(0)) {
      bits = RandomVector(d, random, RandomStreamOf(k), flat + i);
    }
    StoreRounded(d, v, bits, k, static_cast<uint16_t*>(state[k]) + i);
  }

  // Stores the master and the parameter with it. kPlain: no master is NaN.
  template <bool kPlain = false, class D, class V>
  OPTSTATE_OP void StoreMaster(D d, V v, size_t i) const {
    if (master_format == MasterFormat::kSplit) {
      return StoreSplit(d, v, static_cast<uint16_t*>(parameter) + i,
                        static_cast<uint16_t*>(master) + i);
    }
    ops::StoreU(v, d, static_cast<float*>(master) + i);
    if (parameter_dtype == DType::kFloat32) return;
    auto* halves = static_cast<uint16_t*>(parameter) + i;
    if (parameter_dtype == DType::kBFloat16) {
      StoreFloats<DType::kBFloat16, kPlain>(d, v, halves);
    } else {
      StoreFloats<DType::kFloat16>(d, v, halves);
    }
  }
};

// Loads the vectors from index `i` of `arrays` on.
template <class Rule, class D, class Arrays, class V>
OPTSTATE_OP void LoadMasterAndStates(D d, const Arrays& arrays, size_t i,
                                     V& master, V& state0, V& state1,
                                     V& state2) {
  master = arrays.LoadMaster(d, i);
  state0 = state1 = state2 = ops::Zero(d);
  if constexpr (HasState<Rule>(0)) state0 = arrays.LoadState(d, 0, i);
  if constexpr (HasState<Rule>(1)) state1 = arrays.LoadState(d, 1, i);
  if constexpr (HasState<Rule>(2)) state2 = arrays.LoadState(d, 2, i);
}

template <bool kPlain, class Rule, class D, class Arrays, class V>
OPTSTATE_OP void StoreAll(D d, const Arrays& arrays, size_t i, V master,
                          V state0, V state1, V state2) {
  arrays.template StoreMaster<kPlain>(d, master, i);
  const auto bits = arrays.StateBits(d, i);
  if constexpr (HasState<Rule>(0)) arrays.StoreState(d, state0, 0, i, bits);
  if constexpr (HasState<Rule>(1)) arrays.StoreState(d, state1, 1, i, bits);
  if constexpr (HasState<Rule>(2)) arrays.StoreState(d, state2, 2, i, bits);
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
