#ifndef OPTSTATE_KERNELS_UNDO_H_
#define OPTSTATE_KERNELS_UNDO_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/update_kernel.h"
#include "proto/types/layout.h"

namespace optstate {

// Undo memory of one worker thread, in memory that outlives the process
// (mapped shared): 64-byte aligned, fastest at a page's beginning. It is small
// enough for a core's second-level cache; what of it a view needs is in the
// first-level cache too when the view is short.
//
// Whoever starts on a view stores saved = 0 and only then says, wherever it
// keeps that, which view is in hand. The kernel then goes through the view
// vector by vector, and stores for each, in this order:
//   1. the old values, at their own indices in `old`
//   2. saved = the index behind them
//   3. the new values
// So when the thread stops, wherever that is, every element that may have
// changed lies in [0, saved) and has its old value here.
//
// Enough when the process is killed: a killed thread stops between two
// instructions. All stores before have happened and none after, and whoever
// looks once waitpid has reported its end sees them all, because process and
// looker share coherent memory. So the order of the instructions is the order
// in memory, and only the compiler must be kept from changing it: signal
// fences, which cost nothing. (An x86 vector store may tear when another core
// looks on; here nobody looks before the end.)
//
// Not enough when the machine loses power: caches reach memory in any order.
// Then the job restarts from a snapshot or a durable commit.
//
// With streaming stores of master or state the same would hold as long as all
// of the dead thread's write-combining buffers are drained before anyone looks:
// x86 drains them on the interrupt that stops the thread. A thread that goes on
// must put SFENCE between the last new value and the stamp that says that the
// view is done. The parameter's order does not matter: it is the master,
// rounded, and is written anew from that after a crash.
struct UndoSlot {
  // Elements [0, saved) of the view in hand have their old values below.
  std::atomic<uint64_t> saved;
  uint64_t reserved[7];
  // Half a page between a tile's arrays and their copies, when slot and tile
  // both begin at a page. Otherwise each store to old[k][i] would seem to be
  // what the next vector's loads wait for: the CPU compares the low 12 bits of
  // their addresses. Costs up to a third of the speed (README.md).
  uint8_t apart[1984];
  // old[0]: the master, or the accumulator's sum; old[1 + k]: state array k.
  alignas(64) float old[1 + kMaxStateArrays][kTileElements];
  uint8_t whole_pages[2048];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(offsetof(UndoSlot, old) == 2048 && sizeof(UndoSlot) % 4096 == 0);

// Step 2; the fences keep step 1 before it and step 3 behind it.
inline void PublishSaved(UndoSlot* slot, size_t saved) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  slot->saved.store(saved, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Puts the old values of elements [0, saved) back into view.master and the
// first `state_arrays` of view.state; nothing else of the view is used. The
// slot stays as it is, so a process killed in here does it again. DATA_LOSS,
// and nothing is touched, when `saved` is more than view.numel or a tile.
absl::Status RollBack(const UndoSlot& slot, const TileView& view,
                      int state_arrays);

// The same for Accumulate (cast.h).
absl::Status RollBackSum(const UndoSlot& slot, float* sum, size_t numel);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_UNDO_H_
