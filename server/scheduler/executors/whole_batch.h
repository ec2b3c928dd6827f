#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_WHOLE_BATCH_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_WHOLE_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "server/scheduler/executors/batch_memory.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/held_tasks.h"
#include "server/scheduler/executors/kept_parameters.h"
#include "server/scheduler/executors/update_batch.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/worker_undo.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// A batch of whole parameters, for optimizers that need them: their values are
// gathered in pinned memory as floats, copied to the device, updated and copied
// back there, and stored from there as the CPU's updates of them are
// (WholeRecord). A parameter never spans two batches.
//
// One buffer of the host and one of the device have the same bytes:
//   [task table | descents | gradients ->  ...  <- masters, states]
// so that a launch takes two copies to the device and one back. Behind them the
// device has as much again for what its blocks tell each other, if the
// optimizer needs any.
//
// With KeptParameters the masters, and the states that the record has as
// floats, are in their memory on the device in place of the buffer's, and are
// gathered and copied there only where the copy is not the record's.
//
// Threads: as UpdateBatch. Allocates in Make() alone.
class WholeBatch final : public UpdateBatch {
 public:
  // The bytes of a batch that its tables take.
  static uint64_t TableBytes();
  // Returns the bytes of a batch that has room for one parameter.
  static uint64_t BytesOf(OptimizerKind optimizer,
                          const WholeParameter& parameter);
  // Returns the bytes of a batch that has room for each parameter of a layout
  // alone: at least `bytes_min`, and at most `bytes_max`, in which larger ones
  // have none.
  static uint64_t BytesFor(const Layout& layout, uint64_t bytes_min,
                           uint64_t bytes_max);

  // `device` outlives the batch, which is for parameters of this optimizer. So
  // does `kept`: with it all parameters have a copy on the device; null: none.
  // RESOURCE_EXHAUSTED: it lacks memory; other errors are those of the device.
  static absl::StatusOr<std::unique_ptr<WholeBatch>> Make(
      accelerator::Device* device, OptimizerKind optimizer, uint64_t bytes,
      KeptParameters* kept);
  WholeBatch(const WholeBatch&) = delete;
  WholeBatch& operator=(const WholeBatch&) = delete;

  bool CanHold(const UpdateTask& task) const override;
  // The task is of a whole parameter.
  bool Add(size_t slot, const UpdateTask& task, ResidentTile* tile) override;
  size_t size() const override { return tasks_.size(); }
  uint64_t run(size_t i) const override { return tasks_[i].task.run; }
  uint64_t step() const override { return tasks_[0].task.step; }
  uint64_t elements() const override { return elements_; }
  uint64_t bytes() const override { return bytes_; }
  uint64_t bytes_to_device() const override { return bytes_to_device_; }
  uint64_t bytes_to_host() const override { return bytes_ - arrays_begin_; }

  void Gather(size_t i, WorkerUndo* undo) override;
  void SetTimed(bool is_timed) override { memory_->SetTimed(is_timed); }
  std::optional<BatchTimes> Times() const override { return memory_->Times(); }
  absl::Status Submit(const DeviceKernels& kernels) override;
  absl::Status Wait() override { return memory_->Wait(); }
  absl::Status Drain() override { return memory_->stream()->Wait(); }
  bool WriteBack(size_t i, WorkerUndo* undo) override;
  bool UpdateByCpu(size_t i, WorkerUndo* undo) override;
  void Clear() override;

 private:
  // The bytes that a parameter takes: from the front, which is copied to the
  // device alone, from the back, which is copied there and back, and behind
  // them, which is never copied.
  struct Need {
    uint64_t front = 0;
    uint64_t back = 0;
    uint64_t scratch = 0;  // at most front + back
  };
  // The arrays of a task in the pinned memory: from `begin` on those of its
  // copy, if it has one, then others, to `end`.
  struct Place {
    WholeArrays arrays;
    uint64_t begin = 0;
    uint64_t kept_end = 0;
    uint64_t end = 0;
    uint64_t scratch_offset = 0;    // on the device
    KeptParameter* kept = nullptr;  // null: it has no copy
    // The copy is the record's: nothing is copied there.
    bool is_current = false;
  };
  // Bytes of the pinned memory that are copied from or to the device.
  struct Piece {
    uint64_t host_offset = 0;
    accelerator::DeviceAddress device;
    uint64_t bytes = 0;
  };

  WholeBatch(std::unique_ptr<BatchMemory> memory, uint64_t bytes,
             uint64_t device_bytes, KeptParameters* kept);
  static Need NeedOf(OptimizerKind optimizer, const WholeParameter& parameter);
  // Returns the device's address of an offset in the pinned memory: in the
  // buffer, or of one of the task's arrays.
  accelerator::DeviceAddress OnDevice(uint64_t offset) const {
    return memory_->device() + offset;
  }
  accelerator::DeviceAddress OnDevice(const Place& place,
                                      uint64_t offset) const;
  uint64_t OffsetOf(const float* at) const {
    return static_cast<uint64_t>(reinterpret_cast<const std::byte*>(at) -
                                 memory_->host());
  }
  // Sets `pieces_` to the tasks' arrays, those that lie together as one;
  // without those of copies that are the records'.
  void ListPieces(bool with_current);
  void AddPiece(uint64_t begin, uint64_t end,
                accelerator::DeviceAddress device);
  std::byte* HostAt(uint64_t offset) { return memory_->HostAt(offset); }
  float* FloatsAt(uint64_t offset) {
    return reinterpret_cast<float*>(HostAt(offset));
  }

  const uint64_t bytes_;
  const uint64_t device_bytes_;
  const std::unique_ptr<BatchMemory> memory_;
  KeptParameters* const kept_;
  HeldTasks tasks_;
  std::vector<Place> places_;  // by task
  std::vector<Piece> pieces_;
  uint64_t elements_ = 0;
  uint64_t inputs_end_ = 0;    // of the bytes from the front
  uint64_t arrays_begin_ = 0;  // of the bytes from the back
  uint64_t scratch_end_ = 0;   // of the bytes behind them
  uint64_t bytes_to_device_ = 0;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_WHOLE_BATCH_H_
