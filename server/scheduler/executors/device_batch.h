#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_BATCH_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/held_tasks.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/worker_undo.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// The tasks of one launch, all of one record. Their values are gathered in
// pinned memory, copied to the device, updated and copied back there, and
// written to the record from there, with the undo of the kernels. Until then
// the record is as it was, so that the CPU can do the tasks instead.
//
// One buffer of the host and one of the device have the same bytes:
//   [task table | factors | gradients ->  ...  <- parameters, masters, states]
// so that a launch takes two copies to the device and one back.
//
// Threads: one at a time, but Gather and WriteBack may run at the same time for
// different tasks. Allocates in Make() alone.
class DeviceBatch {
 public:
  // The bytes of a batch that its tables take.
  static uint64_t TableBytes();

  // `device` outlives the batch. RESOURCE_EXHAUSTED: it lacks `bytes` of
  // memory; other errors are those of the device.
  static absl::StatusOr<std::unique_ptr<DeviceBatch>> Make(
      accelerator::Device* device, uint64_t bytes);
  DeviceBatch(const DeviceBatch&) = delete;
  DeviceBatch& operator=(const DeviceBatch&) = delete;
  ~DeviceBatch();

  // Adds a task of the record in `slot`, with copies of its lists. Returns
  // false, with nothing changed, when it has no room, or the tasks before have
  // another optimizer or slot.
  bool Add(size_t slot, const UpdateTask& task);
  const HeldTasks& tasks() const { return tasks_; }
  size_t slot() const { return slot_; }
  uint64_t bytes() const { return bytes_; }
  // The bytes of the copies of its tasks.
  uint64_t bytes_to_device() const { return inputs_end_ + bytes_to_host(); }
  uint64_t bytes_to_host() const { return bytes_ - arrays_begin_; }

  // Copies what the update of task i reads to the pinned memory.
  void Gather(size_t i);
  // Enqueues the copies and the update of all tasks, which are gathered.
  absl::Status Submit(const DeviceKernels& kernels);
  // Waits, asleep, until the device has done what Submit() enqueued.
  absl::Status Wait() { return is_over_->Wait(); }
  // Waits until the device uses nothing of the batch, also behind a Submit()
  // that failed half-way.
  absl::Status Drain() { return stream_->Wait(); }
  // Stores the new values of task i, and its stamp.
  void WriteBack(size_t i, WorkerUndo* undo);
  // Forgets the tasks.
  void Clear();

 private:
  // The places of a task in the buffers.
  struct Place {
    uint64_t table_offset = 0;  // of the addresses of its gradients
    uint64_t gradients_offset = 0;
    uint64_t gradient_stride = 0;  // bytes from one gradient to the next
    kernels::TileView staged;      // its arrays in the pinned memory
  };

  DeviceBatch(accelerator::Device* device, uint64_t bytes);
  absl::Status Init();
  // Returns the device's address of a place in the pinned memory.
  template <typename T>
  T* OnDevice(const T* place) const;
  std::byte* HostAt(uint64_t offset) { return host_ + offset; }

  accelerator::Device& device_;
  const uint64_t bytes_;
  std::byte* host_ = nullptr;  // pages of their own, which can be registered
  bool is_registered_ = false;
  accelerator::DeviceAddress memory_;
  std::unique_ptr<accelerator::DeviceEvent> is_over_;
  std::unique_ptr<accelerator::DeviceStream> stream_;
  HeldTasks tasks_;
  std::vector<Place> places_;  // by task
  size_t slot_ = 0;
  uint64_t inputs_end_ = 0;    // of the bytes from the front
  uint64_t arrays_begin_ = 0;  // of the bytes from the back
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_BATCH_H_
