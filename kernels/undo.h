#ifndef OPTSTATE_KERNELS_UNDO_H_
#define OPTSTATE_KERNELS_UNDO_H_

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/undo_fence.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"

namespace optstate::kernels {

// The floats in the widest vector of any target (SVE's 2048 bits), which is
// room for two vectors of all others.
inline constexpr size_t kUndoVectorElements = 64;
inline constexpr size_t kUndoRingElements = 2 * kUndoVectorElements;

// The old values of a block of a view whose state is of bytes
// (StateFormat::kDynamic8).
struct UndoBlock {
  float master[kQuantizedBlockElements];
  float scale[kStateArraysMax + 1];  // the last one fills up
  uint8_t code[kStateArraysMax][kQuantizedBlockElements];
};

// The undo memory of one worker thread, in memory that outlives the process
// (mapped shared).
//
// An update is not rolled back but finished: an element's new values depend on
// that element alone, so only of those that are just being overwritten the old
// values are needed. A thread that starts on a view stores progress =
// UndoProgress(view.begin) and only then says, wherever it keeps that, which
// view is in hand. The kernel then stores, for each vector or pair of vectors,
// in this order:
//   1. the old values, where the vectors before do not have their own
//   2. progress, which names these vectors from now on
//   3. the new values
// So wherever the thread stops, RollBack finds the old values of all elements
// that may be half done, and no others are.
//
// Two positions take turns because between 1 and 2 progress still names the
// vectors before: a process that then looks restores those, which costs nothing
// but doing them again.
//
// Old values are as many bytes more to store as the update itself stores. A
// rule with two arrays of float state keeps a third of that (UndoPhase), when
// a new state depends on its own old value, the gradient and the old master,
// and the new master on its old value and the new states. It keeps but
//     new state 0  xor  new state 1  xor  old master
// and stores the new values array by array, naming each array before it:
//   1. the xor, where the vectors before do not have their own
//   2. progress, phase kState0
//   3. the new values of state 0
//   4. progress, phase kState1
//   5. the new values of state 1
//   6. progress, phase kMaster
//   7. the new masters, and the parameters
// So wherever the thread stops, two of the three are known and give the third:
//   kState0  State 1 and the master are old. The old ones give the new state 1
//            and with it the new state 0: what is there is that, or still old.
//   kState1  State 0 is new, the master old: they give the new state 1.
//   kMaster  Both states are new and give the old master.
// Doing so takes the gradient, so the kernel does it when it is given these
// vectors again, and RollBack leaves them to it.
//
// With state of bytes the unit is a block, which has one position: its end is
// progress too (nothing in flight), and then the next one's old values may
// come. There all of the block may be half done, the parameter too.
//
// This is enough when the process is killed: a killed thread stops between two
// instructions, where the kernel takes it off its core. All stores before have
// happened and none after. Other cores may see them arrive in another order
// (on Arm they do, on x86 they do not), but that matters to an onlooker only,
// and there is none before waitpid has reported the end: the kernel's own locks
// on the way there come after all that the thread stored. So the order of the
// instructions is the order in memory, and only the compiler must be kept from
// changing it: signal fences, which cost nothing, and on Arm no hardware fence
// either. undo_test checks every such point, fence_test every order of stores
// that the fences leave to the compiler, and that each of them is needed; that
// the hardware keeps its promise is reasoning.
//
// Where a vector store runs into a page that is not there, Arm may have stored
// the elements before it. Each is whole, being aligned, and new or old is what
// each step above expects of its elements.
//
// This is not enough when the machine loses power: caches reach memory in any
// order. Then the job restarts from a snapshot or a durable commit.
//
// Streaming stores would need more, for the parameter too: RollBack counts on
// all of elements [0, begin) having arrived. No kernel has any.
enum class UndoPhase : uint32_t {
  kOldValues = 0,  // of all arrays
  kState0 = 1,
  kState1 = 2,
  kMaster = 3,
};

struct alignas(64) UndoSlot {
  // The state of an update: an UndoProgress.
  std::atomic<uint64_t> progress;
  // The state of an Accumulate: elements [0, saved) of the view in hand have
  // their old values in old_sum, those of the whole view and of the sum's
  // dtype: a sum is rolled back to its beginning.
  std::atomic<uint64_t> saved;
  uint64_t reserved[6];
  union {
    // The old values: old[0] is the master, or the xor; old[1 + k] is state
    // array k, bfloat16 ones as floats.
    alignas(64) float old[1 + kStateArraysMax][kUndoRingElements];
    UndoBlock block;
  };
  alignas(64) float old_sum[kTileElements];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(UndoBlock) <= sizeof(UndoSlot::old));
static_assert(offsetof(UndoSlot, old) == 64 &&
              offsetof(UndoSlot, old_sum) == 2112 && sizeof(UndoSlot) == 18496);

// Encodes progress. Elements [0, begin) of the view in hand have their new
// values. The next `length` may have either; their old ones are in old[k] from
// `position` on. The others have their old values. `length` 0: nothing is in
// flight.
constexpr uint64_t UndoProgress(size_t begin, size_t position = 0,
                                size_t length = 0,
                                UndoPhase phase = UndoPhase::kOldValues) {
  return uint64_t{begin} << 32 | uint64_t{position} << 16 |
         uint64_t{static_cast<uint32_t>(phase)} << 14 | uint64_t{length};
}

// Returns the progress of as many elements further, at the other position.
constexpr uint64_t NextUndoProgress(uint64_t progress, size_t length) {
  return (progress + (uint64_t{length} << 32)) ^
         uint64_t { kUndoVectorElements } << 16;
}

// A decoded UndoProgress value.
struct UndoInFlight {
  size_t begin;
  size_t position;
  size_t length;
  UndoPhase phase;
};

constexpr UndoInFlight InFlightOf(uint64_t progress) {
  return {progress >> 32, progress >> 16 & 0xFFFF, progress & 0x3FFF,
          static_cast<UndoPhase>(progress >> 14 & 3)};
}

// Makes step 2; the fences keep step 1 before it and step 3 behind it.
inline void PublishProgress(UndoSlot* slot, uint64_t progress) {
  Fence<UndoFence::kBeforeProgress>();
  slot->progress.store(progress, std::memory_order_relaxed);
  Fence<UndoFence::kBehindProgress>();
}

// Publishes progress where nothing but the phase differs, of less than 256
// elements: one store of a byte that needs no register.
inline void PublishPhase(UndoSlot* slot, UndoPhase phase) {
  static_assert(std::endian::native == std::endian::little);
  static_assert(kUndoVectorElements < 256);
  Fence<UndoFence::kBeforeProgress>();
  volatile uint8_t* const bytes =
      reinterpret_cast<volatile uint8_t*>(&slot->progress);
  bytes[1] = static_cast<uint8_t>(UndoProgress(0, 0, 0, phase) >> 8);
  Fence<UndoFence::kBehindProgress>();
}

// Publishes progress of Accumulate (cast.h), where nothing takes turns.
inline void PublishSaved(UndoSlot* slot, size_t saved) {
  Fence<UndoFence::kBeforeSaved>();
  slot->saved.store(saved, std::memory_order_relaxed);
  Fence<UndoFence::kBehindSaved>();
}

// Puts the old values of what is in flight back into the master and those
// arrays of view.state that are not null, which are of the key's formats; of
// the rest of the view only numel is used. Returns the first element that is
// not updated, the TileView::begin to go on with; progress says so too, with
// nothing in flight, or, when the kernel keeps a xor, with what it is to finish
// first. Idempotent: a crash here repeats it. DATA_LOSS, and nothing is
// touched, when the progress is impossible for that kernel and a view of this
// length.
absl::StatusOr<size_t> RollBack(const TileView& view,
                                const UpdateKernel& kernel, StateFormat state,
                                MasterFormat master, UndoSlot* slot);

// Puts the old values of elements [0, saved) of an Accumulate back. The slot
// stays as it is, so a crash here repeats it. DATA_LOSS, and nothing is
// touched, when `saved` is more than numel or a tile.
absl::Status RollBackSum(const UndoSlot& slot, DType sum_dtype, void* sum,
                         size_t numel);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_UNDO_H_
