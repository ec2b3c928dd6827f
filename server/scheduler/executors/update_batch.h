#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_BATCH_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/scheduler/executors/batch_times.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/resident_records.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/worker_undo.h"

namespace optstate::scheduler {

// The tasks of one launch on a device: Add, Gather each, Submit, Wait,
// WriteBack each, Clear. Until WriteBack the records are as they were, so that
// the CPU can do the tasks instead.
//
// Threads: one at a time, but the functions of one task may run at the same
// time for different tasks.
class UpdateBatch {
 public:
  virtual ~UpdateBatch() = default;

  // Returns whether the batch has room for the task when it is empty. It may
  // say so of one that is too large, which Add() then refuses.
  virtual bool CanHold(const UpdateTask& /*task*/) const { return true; }
  // Adds a task of the record in `slot`, after those of slots before; `tile` is
  // the place of its record on this device, null when it has none. Returns
  // false, with nothing changed, when it has no room, or the tasks before have
  // another optimizer.
  virtual bool Add(size_t slot, const UpdateTask& task, ResidentTile* tile) = 0;
  virtual size_t size() const = 0;
  // Returns the run of task i, and the step of all tasks.
  virtual uint64_t run(size_t i) const = 0;
  virtual uint64_t step() const = 0;
  virtual uint64_t elements() const = 0;
  // Returns the slots of its tasks, each once, in their order.
  absl::Span<const size_t> slots() const { return slots_; }
  // Returns its memory, and the bytes of the copies of its tasks.
  virtual uint64_t bytes() const = 0;
  virtual uint64_t bytes_to_device() const = 0;
  virtual uint64_t bytes_to_host() const = 0;
  // Returns the bytes of gradients that were on the device already.
  virtual uint64_t bytes_there() const { return 0; }
  // Returns the elements of tasks that WriteBack() has had the CPU do, because
  // the gradient on the device was another one.
  virtual uint64_t refused_elements() const { return 0; }
  // Returns the elements of tasks that are not done: the device did not do
  // them, and the CPU lacks their records.
  virtual uint64_t left_elements() const { return 0; }

  // Makes what the update of task i reads ready to be copied.
  virtual void Gather(size_t i, WorkerUndo* undo) = 0;
  // Says whether the device is to measure the parts of what Submit() enqueues,
  // and returns what it has measured, once Wait() has returned OK.
  virtual void SetTimed(bool is_timed) = 0;
  virtual std::optional<BatchTimes> Times() const = 0;
  // Enqueues the copies and the update of all tasks, which are gathered.
  virtual absl::Status Submit(const DeviceKernels& kernels) = 0;
  // Waits, asleep, until the device has done what Submit() enqueued.
  virtual absl::Status Wait() = 0;
  // Waits until the device uses nothing of the batch, also behind a Submit()
  // that failed half-way.
  virtual absl::Status Drain() = 0;
  // Stores the new values of task i, and its stamp. Returns false when the task
  // is left.
  virtual bool WriteBack(size_t i, WorkerUndo* undo) = 0;
  // Does task i by the CPU's kernel, whatever the device has done of it.
  // Returns false when the task is left.
  virtual bool UpdateByCpu(size_t i, WorkerUndo* undo) = 0;
  // Forgets the tasks.
  virtual void Clear() = 0;

 protected:
  void NoteSlot(size_t slot) {
    if (slots_.empty() || slots_.back() != slot) slots_.push_back(slot);
  }

  std::vector<size_t> slots_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_BATCH_H_
