#include "kernels/write_back.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/split_master.h"
#include "kernels/undo.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"

namespace optstate::kernels {
namespace {

void CopyElements(void* to, const void* from, size_t begin, size_t length,
                  size_t element_bytes) {
  std::memcpy(static_cast<std::byte*>(to) + begin * element_bytes,
              static_cast<const std::byte*>(from) + begin * element_bytes,
              length * element_bytes);
}

// Stores the new values of elements [begin, begin + length).
void StoreNew(const UpdateKernelKey& key, const TileView& from,
              const TileView& to, size_t begin, size_t length) {
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (to.state[k] == nullptr) continue;
    CopyElements(to.state[k], from.state[k], begin, length,
                 SizeInBytes(key.state));
    if (key.state != StateFormat::kDynamic8) continue;
    const size_t first = begin / kQuantizedBlockElements;
    const size_t end = (begin + length + kQuantizedBlockElements - 1) /
                       kQuantizedBlockElements;
    std::copy(from.scale[k] + first, from.scale[k] + end, to.scale[k] + first);
  }
  CopyElements(to.parameter, from.parameter, begin, length,
               SizeInBytes(key.parameter));
  // A float32 parameter is its own master.
  if (to.master == to.parameter) return;
  CopyElements(to.master, from.master, begin, length, SizeInBytes(key.master));
}

void KeepMaster(const UpdateKernelKey& key, const TileView& view, size_t begin,
                size_t length, float* old) {
  if (key.master != MasterFormat::kSplit) {
    std::memcpy(old, static_cast<const float*>(view.master) + begin,
                length * sizeof(float));
    return;
  }
  const auto* upper = static_cast<const uint16_t*>(view.parameter) + begin;
  const auto* lower = static_cast<const uint16_t*>(view.master) + begin;
  for (size_t i = 0; i < length; ++i) old[i] = JoinMaster(upper[i], lower[i]);
}

void KeepVector(const UpdateKernelKey& key, const TileView& view, size_t begin,
                size_t position, size_t length) {
  UndoSlot& slot = *view.undo;
  KeepMaster(key, view, begin, length, slot.old[0] + position);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (view.state[k] == nullptr) continue;
    float* const old = slot.old[1 + k] + position;
    if (key.state == StateFormat::kFloat32) {
      std::memcpy(old, static_cast<const float*>(view.state[k]) + begin,
                  length * sizeof(float));
      continue;
    }
    const auto* halves = static_cast<const uint16_t*>(view.state[k]) + begin;
    for (size_t i = 0; i < length; ++i) {
      old[i] = std::bit_cast<float>(uint32_t{halves[i]} << 16);
    }
  }
}

void KeepBlock(const UpdateKernelKey& key, const TileView& view, size_t begin,
               size_t length) {
  UndoBlock& old = view.undo->block;
  KeepMaster(key, view, begin, length, old.master);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (view.state[k] == nullptr) continue;
    std::memcpy(old.code[k], static_cast<const uint8_t*>(view.state[k]) + begin,
                length);
    old.scale[k] = view.scale[k][begin / kQuantizedBlockElements];
  }
}

void WriteVectors(const UpdateKernelKey& key, const TileView& from,
                  const TileView& to) {
  size_t position = 0;
  for (size_t begin = to.begin; begin < to.numel;
       begin += kUndoVectorElements) {
    const size_t length = std::min(kUndoVectorElements, to.numel - begin);
    KeepVector(key, to, begin, position, length);
    PublishProgress(to.undo, UndoProgress(begin, position, length));
    StoreNew(key, from, to, begin, length);
    position ^= kUndoVectorElements;
  }
}

void WriteBlocks(const UpdateKernelKey& key, const TileView& from,
                 const TileView& to) {
  for (size_t begin = to.begin; begin < to.numel;
       begin += kQuantizedBlockElements) {
    const size_t length = std::min(kQuantizedBlockElements, to.numel - begin);
    KeepBlock(key, to, begin, length);
    PublishProgress(to.undo, UndoProgress(begin, 0, length));
    StoreNew(key, from, to, begin, length);
    // The next block's old values come to the same place.
    PublishProgress(to.undo, UndoProgress(begin + length));
  }
}

}  // namespace

void WriteBack(const UpdateKernelKey& key, const TileView& from,
               const TileView& to) {
  if (to.undo == nullptr) {
    StoreNew(key, from, to, to.begin, to.numel - to.begin);
  } else if (key.state == StateFormat::kDynamic8) {
    WriteBlocks(key, from, to);
  } else {
    WriteVectors(key, from, to);
  }
}

}  // namespace optstate::kernels
