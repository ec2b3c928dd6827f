#include "kernels/undo.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/update_kernel.h"
#include "proto/types/layout.h"

namespace optstate {

absl::StatusOr<size_t> RollBack(const TileView& view, int state_arrays,
                                UndoSlot* slot) {
  const uint64_t progress = slot->progress.load(std::memory_order_relaxed);
  const size_t begin = progress >> 16;
  const size_t position = progress >> 8 & 0xFF;
  const size_t length = progress & 0xFF;
  if (begin + length > view.numel || position + length > kUndoRingElements) {
    return absl::DataLossError(
        absl::StrCat("undo slot has ", length, " elements at ", position,
                     " for those from ", begin, " of a view of ", view.numel));
  }
  const size_t bytes = length * sizeof(float);
  std::memcpy(view.master + begin, slot->old[0] + position, bytes);
  for (int k = 0; k < state_arrays; ++k) {
    std::memcpy(view.state[k] + begin, slot->old[1 + k] + position, bytes);
  }
  PublishProgress(slot, UndoProgress(begin));
  return begin;
}

absl::Status RollBackSum(const UndoSlot& slot, float* sum, size_t numel) {
  const uint64_t saved = slot.saved.load(std::memory_order_relaxed);
  if (saved > std::min<uint64_t>(numel, kTileElements)) {
    return absl::DataLossError(
        absl::StrCat("undo slot has ", saved, " elements of a sum of ", numel));
  }
  std::memcpy(sum, slot.old_sum, saved * sizeof(float));
  return absl::OkStatus();
}

}  // namespace optstate
