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
namespace {

absl::StatusOr<size_t> SavedOf(const UndoSlot& slot, size_t numel) {
  const uint64_t saved = slot.saved.load(std::memory_order_relaxed);
  if (saved > std::min<uint64_t>(numel, kTileElements)) {
    return absl::DataLossError(absl::StrCat("undo slot has ", saved,
                                            " elements of a view of ", numel));
  }
  return saved;
}

}  // namespace

absl::Status RollBack(const UndoSlot& slot, const TileView& view,
                      int state_arrays) {
  const absl::StatusOr<size_t> saved = SavedOf(slot, view.numel);
  if (!saved.ok()) return saved.status();
  std::memcpy(view.master, slot.old[0], *saved * sizeof(float));
  for (int k = 0; k < state_arrays; ++k) {
    std::memcpy(view.state[k], slot.old[1 + k], *saved * sizeof(float));
  }
  return absl::OkStatus();
}

absl::Status RollBackSum(const UndoSlot& slot, float* sum, size_t numel) {
  TileView view;
  view.master = sum;
  view.numel = numel;
  return RollBack(slot, view, /*state_arrays=*/0);
}

}  // namespace optstate
