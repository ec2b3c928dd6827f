#include "kernels/undo.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/split_master.h"
#include "kernels/update_kernel.h"
#include "proto/types/layout.h"

namespace optstate::kernels {

namespace {

void RestoreMaster(const TileView& view, MasterFormat format, const float* old,
                   size_t begin, size_t length) {
  if (format == MasterFormat::kSplit) {
    SplitMaster(old, static_cast<uint16_t*>(view.parameter) + begin,
                static_cast<uint16_t*>(view.master) + begin, length);
    return;
  }
  std::memcpy(static_cast<float*>(view.master) + begin, old,
              length * sizeof(float));
}

// Restores elements [begin, begin + length), a block of the view or its rest.
void RestoreBlock(const TileView& view, MasterFormat master,
                  const UndoBlock& old, size_t begin, size_t length) {
  RestoreMaster(view, master, old.master, begin, length);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (view.state[k] == nullptr) continue;
    std::memcpy(static_cast<uint8_t*>(view.state[k]) + begin, old.code[k],
                length);
    view.scale[k][begin / kQuantizedBlockElements] = old.scale[k];
  }
}

void RestoreVector(const TileView& view, StateFormat state, MasterFormat master,
                   const UndoSlot& slot, size_t begin, size_t position,
                   size_t length) {
  const size_t bytes = length * sizeof(float);
  RestoreMaster(view, master, slot.old[0] + position, begin, length);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (view.state[k] == nullptr) continue;
    const float* old = slot.old[1 + k] + position;
    if (state == StateFormat::kFloat32) {
      std::memcpy(static_cast<float*>(view.state[k]) + begin, old, bytes);
      continue;
    }
    auto* halves = static_cast<uint16_t*>(view.state[k]) + begin;
    for (size_t i = 0; i < length; ++i) {
      halves[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(old[i]) >> 16);
    }
  }
}

// Returns whether the kernel can have published this for a view of `numel`
// elements.
bool IsPossible(const UndoInFlight& in_flight, const UpdateKernel& kernel,
                StateFormat state, size_t numel) {
  const auto [begin, position, length, phase] = in_flight;
  if (begin > numel || length > numel - begin) return false;
  if (phase != UndoPhase::kOldValues && (!kernel.keeps_xor || length == 0)) {
    return false;
  }
  if (state != StateFormat::kDynamic8) {
    return position + length <= kUndoRingElements;
  }
  const size_t rest = std::min(kQuantizedBlockElements, numel - begin);
  const bool begins_block = begin % kQuantizedBlockElements == 0;
  return position == 0 && (length == 0 || (begins_block && length == rest));
}

}  // namespace

absl::StatusOr<size_t> RollBack(const TileView& view,
                                const UpdateKernel& kernel, StateFormat state,
                                MasterFormat master, UndoSlot* slot) {
  const UndoInFlight in_flight =
      InFlightOf(slot->progress.load(std::memory_order_relaxed));
  const auto [begin, position, length, phase] = in_flight;
  if (!IsPossible(in_flight, kernel, state, view.numel)) {
    return absl::DataLossError(
        absl::StrCat("undo slot has ", length, " elements at ", position,
                     " for those from ", begin, " of a view of ", view.numel,
                     ", phase ", static_cast<uint32_t>(phase)));
  }
  if (phase != UndoPhase::kOldValues) return begin;
  if (length > 0 && state == StateFormat::kDynamic8) {
    RestoreBlock(view, master, slot->block, begin, length);
  } else if (length > 0) {
    RestoreVector(view, state, master, *slot, begin, position, length);
  }
  PublishProgress(slot, UndoProgress(begin));
  return begin;
}

absl::Status RollBackSum(const UndoSlot& slot, DType sum_dtype, void* sum,
                         size_t numel) {
  const uint64_t saved = slot.saved.load(std::memory_order_relaxed);
  if (saved > std::min<uint64_t>(numel, kTileElements)) {
    return absl::DataLossError(
        absl::StrCat("undo slot has ", saved, " elements of a sum of ", numel));
  }
  std::memcpy(sum, slot.old_sum, saved * SizeInBytes(sum_dtype));
  return absl::OkStatus();
}

}  // namespace optstate::kernels
