#ifndef OPTSTATE_SERVER_SCHEDULER_WORKER_UNDO_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKER_UNDO_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/undo.h"
#include "kernels/undo_fence.h"

namespace optstate::scheduler {

enum class UndoKind : uint64_t {
  kNone = 0,
  kUpdate = 1,
  kAccumulate = 2,
  // All new values of the parameter whose first run is named lie in the
  // worker's part of the `redo` file; they are installed, and nothing is rolled
  // back.
  kReplace = 3,
  // The update of a logged step (gradient_log.h), which the record lacks; the
  // stamp is the log's, not the run's.
  kReplay = 4,
};

// One worker's part of the job's `undo` file: the run that it is writing, its
// progress, and the old values that it is just overwriting, or the data to
// restore them. FORMAT.md has the bytes.
//
// Order of stores, each of which a kill may follow:
//   Begin   progress = saved = 0, then run and stamp, then kind: a slot that
//           names a run has nothing of another.
//   kernel  old values or their xor, then progress, then new values
//           (kernels/undo.h).
//   End     the run's stamp, then kind = none.
// So a later process finds a run in flight exactly when a slot names it and it
// does not carry the slot's stamp. An update then goes on behind the last
// vector that is whole; an accumulation starts over. This holds against the end
// of a process: a thread stops between two instructions, and the ones before
// have happened for any process that looks after its death, whatever the
// processor had reordered. Only the compiler has to be restrained, which signal
// fences do; they cost no instruction. The order does not hold against a power
// cut, where memory is lost, or, on a disk, pages were written in any order.
struct alignas(64) WorkerUndo {
  std::atomic<uint64_t> kind;  // UndoKind
  uint64_t run;
  uint64_t stamp;
  uint64_t reserved[5];
  kernels::UndoSlot slot;

  void Begin(UndoKind what, uint64_t run_index, uint64_t run_stamp) {
    slot.progress.store(0, std::memory_order_relaxed);
    slot.saved.store(0, std::memory_order_relaxed);
    kernels::Fence<kernels::UndoFence::kBeforeRun>();
    run = run_index;
    stamp = run_stamp;
    kernels::Fence<kernels::UndoFence::kBeforeKind>();
    kind.store(static_cast<uint64_t>(what), std::memory_order_relaxed);
    kernels::Fence<kernels::UndoFence::kBehindKind>();
  }
  void End(std::atomic<uint64_t>* stamp_of_run) {
    kernels::Fence<kernels::UndoFence::kBeforeStamp>();
    // Release: ranks that see it read the parameter's new values.
    stamp_of_run->store(stamp, std::memory_order_release);
    kernels::Fence<kernels::UndoFence::kBehindStamp>();
    Clear();
  }
  void Clear() {
    kind.store(static_cast<uint64_t>(UndoKind::kNone),
               std::memory_order_relaxed);
  }
};
static_assert(offsetof(WorkerUndo, slot) == 64);
static_assert(sizeof(WorkerUndo) % 64 == 0);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKER_UNDO_H_
