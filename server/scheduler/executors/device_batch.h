#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_BATCH_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/executors/batch_memory.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/held_tasks.h"
#include "server/scheduler/executors/update_batch.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/worker_undo.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// A batch of records that stay on the host: their values are gathered in pinned
// memory, copied to the device, updated and copied back there, and written to
// the records from there, with the undo of the kernels.
//
// One buffer of the host and one of the device have the same bytes:
//   [task table | factors | gradients ->  ...  <- parameters, masters, states]
// so that a launch takes two copies to the device and one back.
//
// Threads: as UpdateBatch. Allocates in Make() alone.
class DeviceBatch final : public UpdateBatch {
 public:
  // The bytes of a batch that its tables take.
  static uint64_t TableBytes();

  // `device` outlives the batch. RESOURCE_EXHAUSTED: it lacks `bytes` of
  // memory; other errors are those of the device.
  static absl::StatusOr<std::unique_ptr<DeviceBatch>> Make(
      accelerator::Device* device, uint64_t bytes);
  DeviceBatch(const DeviceBatch&) = delete;
  DeviceBatch& operator=(const DeviceBatch&) = delete;

  // Takes copies of the task's lists.
  bool Add(size_t slot, const UpdateTask& task, ResidentTile* tile) override;
  size_t size() const override { return tasks_.size(); }
  uint64_t run(size_t i) const override { return tasks_[i].task.run; }
  uint64_t step() const override { return tasks_[0].task.step; }
  uint64_t elements() const override { return elements_; }
  uint64_t bytes() const override { return bytes_; }
  uint64_t bytes_to_device() const override {
    return inputs_end_ + bytes_to_host();
  }
  uint64_t bytes_to_host() const override { return bytes_ - arrays_begin_; }

  void Gather(size_t i, WorkerUndo* undo) override;
  void SetTimed(bool is_timed) override { memory_->SetTimed(is_timed); }
  std::optional<BatchTimes> Times() const override { return memory_->Times(); }
  absl::Status Submit(const DeviceKernels& kernels) override;
  absl::Status Wait() override { return memory_->Wait(); }
  absl::Status Drain() override { return memory_->stream()->Wait(); }
  bool WriteBack(size_t i, WorkerUndo* undo) override;
  bool UpdateByCpu(size_t i, WorkerUndo* undo) override {
    tasks_.UpdateByCpu(i, undo);
    return true;
  }
  void Clear() override;

 private:
  // The places of a task in the buffers.
  struct Place {
    uint64_t table_offset = 0;  // of the addresses of its gradients
    uint64_t gradients_offset = 0;
    uint64_t gradient_stride = 0;  // bytes from one gradient to the next
    kernels::TileView staged;      // its arrays in the pinned memory
  };

  DeviceBatch(std::unique_ptr<BatchMemory> memory, uint64_t bytes);
  // Returns the device's address of a place in the pinned memory.
  template <typename T>
  T* OnDevice(const T* place) const;
  std::byte* HostAt(uint64_t offset) { return memory_->HostAt(offset); }

  const uint64_t bytes_;
  const std::unique_ptr<BatchMemory> memory_;
  HeldTasks tasks_;
  std::vector<Place> places_;  // by task
  uint64_t elements_ = 0;
  uint64_t inputs_end_ = 0;    // of the bytes from the front
  uint64_t arrays_begin_ = 0;  // of the bytes from the back
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_BATCH_H_
