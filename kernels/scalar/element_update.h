#ifndef OPTSTATE_KERNELS_SCALAR_ELEMENT_UPDATE_H_
#define OPTSTATE_KERNELS_SCALAR_ELEMENT_UPDATE_H_

// The update of one element by one thread, for CUDA's threads and for the loop
// of tile_update.cc.

#include <cstddef>
#include <cstdint>

#include "kernels/ops/scalar_ops.h"
// These includes come after scalar_ops.h.
#include "kernels/ops/dynamic_codes-inl.h"
#include "kernels/ops/gradient_sum-inl.h"
#include "kernels/rules/elements-inl.h"
#include "kernels/rules/rule-inl.h"
#include "kernels/update_kernel.h"

namespace optstate::kernels::scalar {

// One tile. With kDynamic8 the state arrays are of bytes, which AnyElements
// does not know: they go through LoadCode and StoreCode.
struct TileElements : AnyElements {
  GradientElements gradient;
  float* scale[kStateArraysMax];  // of each block, with kDynamic8
};

// Returns the elements of a view for the kernel of `key`.
inline TileElements TileElementsOf(const UpdateKernelKey& key,
                                   const UpdateFactors& factors,
                                   const TileView& view) {
  TileElements tile = {};
  tile.parameter = view.parameter;
  tile.master = view.master;
  for (int k = 0; k < kStateArraysMax; ++k) {
    tile.state[k] = view.state[k];
    tile.scale[k] = view.scale[k];
  }
  tile.parameter_dtype = key.parameter;
  tile.state_format = key.state;
  tile.master_format = key.master;
  tile.flat = view.flat_begin;
  tile.random = RandomKeysOf(factors.random_seed, view.flat_begin);
  tile.gradient = {view.gradients.data(), view.gradients.size(), key.gradient,
                   0};
  return tile;
}

// Updates element i, whose states are of float or bfloat16.
template <class Rule>
OPTSTATE_OP void UpdateElement(const GradientScale& scale, const Rule& rule,
                               const TileElements& tile, size_t i) {
  const ops::FloatTag d;
  float master, state0, state1, state2;
  LoadMasterAndStates<Rule>(d, tile, i, master, state0, state1, state2);
  UpdateLoaded<false>(d, scale, rule, tile.gradient.Load(d, i), master, state0,
                      state1, state2);
  StoreAll<false, Rule>(d, tile, i, master, state0, state1, state2);
}

template <class Rule>
constexpr bool IsNeverNegative(int k) {
  return (Rule::kSquares >> k & 1) != 0;
}

template <bool kSigned>
OPTSTATE_OP float LoadCode(const TileElements& tile, int k, size_t i) {
  const auto* codes = static_cast<const CodeOf<kSigned>*>(tile.state[k]);
  const BlockDecoder<kSigned> decoder(
      tile.scale[k][i / kQuantizedBlockElements]);
  return decoder.Load(ops::FloatTag(), codes + i);
}

template <class Rule, int kState>
OPTSTATE_OP float LoadState(const TileElements& tile, size_t i) {
  if constexpr (HasState<Rule>(kState)) {
    return LoadCode<!IsNeverNegative<Rule>(kState)>(tile, kState, i);
  }
  return 0;
}

// The new states of an element of a block.
struct BlockStates {
  float state[kStateArraysMax];
};

// Updates the master and the parameter of element i, whose states are of bytes.
// Returns its new states: they are stored with EndBlockElement when the block's
// largest are known.
template <class Rule>
OPTSTATE_OP BlockStates BeginBlockElement(const GradientScale& scale,
                                          const Rule& rule,
                                          const TileElements& tile, size_t i) {
  const ops::FloatTag d;
  float master = tile.LoadMaster(d, i);
  BlockStates block = {{LoadState<Rule, 0>(tile, i),
                        LoadState<Rule, 1>(tile, i),
                        LoadState<Rule, 2>(tile, i)}};
  UpdateLoaded<false>(d, scale, rule, tile.gradient.Load(d, i), master,
                      block.state[0], block.state[1], block.state[2]);
  tile.StoreMaster(d, master, i);
  return block;
}

// Returns the magnitude as ScaleOf takes the largest of them.
OPTSTATE_HOST_DEVICE inline int32_t MagnitudeBits(float value) {
  return __builtin_bit_cast(int32_t, ops::Abs(value));
}

template <bool kSigned>
OPTSTATE_OP void StoreCode(const TileElements& tile, int k, size_t i,
                           float value, float block_scale) {
  auto* const to = static_cast<CodeOf<kSigned>*>(tile.state[k]) + i;
  const BlockEncoder<kSigned> encoder(block_scale);
  if (encoder.IsZero()) {
    *to = 0;
    return;
  }
  if (encoder.NeedsNormalizing()) value = encoder.Normalized(value);
  encoder.Store(ops::FloatTag(), value, to);
}

// Stores state k of element i of a block with this scale.
template <class Rule>
OPTSTATE_OP void EndBlockElement(const TileElements& tile, int k, size_t i,
                                 float value, float block_scale) {
  if (IsNeverNegative<Rule>(k)) {
    StoreCode<false>(tile, k, i, value, block_scale);
  } else {
    StoreCode<true>(tile, k, i, value, block_scale);
  }
}

}  // namespace optstate::kernels::scalar

#endif  // OPTSTATE_KERNELS_SCALAR_ELEMENT_UPDATE_H_
