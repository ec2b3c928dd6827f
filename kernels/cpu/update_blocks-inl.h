// The walk over a tile whose state arrays are of bytes: block by block, with
// the traversal of update-inl.h inside. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_UPDATE_BLOCKS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_UPDATE_BLOCKS_INL_H_
#undef OPTSTATE_KERNELS_CPU_UPDATE_BLOCKS_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_UPDATE_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/dynamic-inl.h"
#include "kernels/cpu/update-inl.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {

// Buffers of one block, in the first-level cache.
struct BlockBuffers {
  HWY_ALIGN float state[kStateArraysMax][kQuantizedBlockElements];
  HWY_ALIGN uint8_t code[kQuantizedBlockElements];
};

// Keeps a block's old values, before it is in flight. `arrays` begin with it.
template <class Rule, class Arrays>
void SaveBlock(const TileView& view, const Arrays& arrays, size_t begin,
               size_t numel) {
  UndoBlock& old = view.undo->block;
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    hn::StoreU(arrays.LoadMaster(d, i), d, old.master + i);
  }
  for (; i < numel; ++i) {
    const hn::CappedTag<float, 1> one;
    hn::StoreU(arrays.LoadMaster(one, i), one, old.master + i);
  }
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!HasState<Rule>(k)) continue;
    std::memcpy(old.code[k], static_cast<uint8_t*>(view.state[k]) + begin,
                numel);
    old.scale[k] = view.scale[k][begin / kQuantizedBlockElements];
  }
  PublishProgress(view.undo, UndoProgress(begin, 0, numel));
}

template <class Rule>
void DecodeState(const TileView& view, size_t begin, size_t numel, int k,
                 BlockBuffers* buffers) {
  const uint8_t* codes = static_cast<uint8_t*>(view.state[k]) + begin;
  const float scale = view.scale[k][begin / kQuantizedBlockElements];
  if (numel < kQuantizedBlockElements) {
    // The block is filled up with zeros, which never are the largest.
    std::memset(buffers->code, 0, kQuantizedBlockElements);
    std::memcpy(buffers->code, codes, numel);
    codes = buffers->code;
  }
  if ((Rule::kSquares >> k & 1) != 0) {
    DecodeBlock<false>(codes, scale, buffers->state[k]);
  } else {
    DecodeBlock<true>(codes, scale, buffers->state[k]);
  }
}

template <class Rule>
void EncodeState(const TileView& view, size_t begin, size_t numel, int k,
                 BlockBuffers* buffers) {
  uint8_t* codes = static_cast<uint8_t*>(view.state[k]) + begin;
  const bool is_whole = numel == kQuantizedBlockElements;
  uint8_t* to = is_whole ? codes : buffers->code;
  view.scale[k][begin / kQuantizedBlockElements] =
      (Rule::kSquares >> k & 1) != 0 ? EncodeBlock<false>(buffers->state[k], to)
                                     : EncodeBlock<true>(buffers->state[k], to);
  if (!is_whole) std::memcpy(codes, buffers->code, numel);
}

// Updates elements [begin, begin + numel), a block or the rest of the view.
template <class Rule, class Arrays>
void UpdateBlock(const UpdateFactors& factors, const TileView& view,
                 size_t begin, size_t numel, Arrays arrays,
                 BlockBuffers* buffers) {
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!HasState<Rule>(k)) continue;
    DecodeState<Rule>(view, begin, numel, k, buffers);
    arrays.state[k] = buffers->state[k];
  }
  arrays.master = Advance(view.master, begin * arrays.MasterBytes());
  arrays.parameter = Advance(view.parameter, begin * arrays.ParameterBytes());
  arrays.MoveGradient(begin);
  if (view.undo != nullptr) SaveBlock<Rule>(view, arrays, begin, numel);
  UpdateRange<Rule>(factors, arrays, 0, numel, 0, /*undo=*/nullptr);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (HasState<Rule>(k)) EncodeState<Rule>(view, begin, numel, k, buffers);
  }
  if (view.undo != nullptr) {
    PublishProgress(view.undo, UndoProgress(begin + numel));
  }
}

template <class Rule, class Arrays>
HWY_NOINLINE void UpdateBlocks(const UpdateFactors& factors,
                               const TileView& view, const Arrays& arrays) {
  BlockBuffers buffers;
  for (size_t begin = view.begin; begin < view.numel;
       begin += kQuantizedBlockElements) {
    const size_t numel = std::min(kQuantizedBlockElements, view.numel - begin);
    UpdateBlock<Rule>(factors, view, begin, numel, arrays, &buffers);
  }
}

// Implements UpdateKernel::apply of a rule with state arrays of bytes.
template <class Rule, DType kGradient, DType kParameter, MasterFormat kMaster>
void UpdateDynamic(const UpdateFactors& factors, const TileView& view) {
  UpdateBlocks<Rule>(
      factors, view,
      ArraysOf(view, kGradient, kParameter, StateFormat::kFloat32, kMaster, 0));
}

// UpdateDynamic for dtypes that the loops know, those of UpdateFixed.
template <class Rule, DType kGradient, DType kParameter, MasterFormat kMaster>
void UpdateFixedDynamic(const UpdateFactors& factors, const TileView& view) {
  WithFixedArrays<kGradient, kParameter, kMaster>(
      view, [&](const auto& arrays)
                HWY_ATTR { UpdateBlocks<Rule>(factors, view, arrays); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
