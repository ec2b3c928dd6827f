#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/executors/device_batch.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// Updates records that stay on the host by a device, through a bounded number
// of bounded batches. While the device works on some, the workers of a pool
// gather the next one and write the last one back, with the same undo as the
// CPU's kernels: a process that is killed leaves what it would have left with
// CpuUpdateExecutor. Reductions are the CPU's.
//
// A device that fails costs time and no bits: the tasks of its batch are done
// by the CPU's kernels, whose results are equal, and all further ones too when
// the device is lost. So Update() has no errors but those of Open().
//
// Threads: as UpdateExecutor; counters() may be called by any thread.
class DeviceUpdateExecutor final : public UpdateExecutor {
 public:
  // All outlive the executor.
  struct Options {
    accelerator::Device* device = nullptr;
    const DeviceKernels* kernels = nullptr;
    WorkerPool* pool = nullptr;
    // As for CpuUpdateExecutor, but at least one slot.
    absl::Span<WorkerUndo> undo;
    StepObserver* observer = nullptr;  // may be null
    // The memory of a batch, of the device and pinned on the host, more than
    // DeviceBatch::TableBytes(); a task that needs more is done by the CPU.
    uint64_t batch_bytes = uint64_t{8} << 20;
    size_t batches = 3;  // at least one
  };
  struct Counters {
    uint64_t device_runs = 0;
    uint64_t cpu_runs = 0;
    // Why the device did not do a batch, last; INTERNAL: it is lost.
    absl::Status failure;
  };

  // INVALID_ARGUMENT: the batches are none, or too small. Other errors are
  // those of the device's memory and streams.
  static absl::StatusOr<std::unique_ptr<DeviceUpdateExecutor>> Create(
      const Options& options);

  absl::Status CanUpdate(const Layout& layout,
                         Accumulation accumulation) const override;
  // Tasks of one record are taken while the batches of the one before are under
  // way. That pins two records: a job on disk has three frames at least.
  size_t slots() const override { return records_.size(); }
  void Reduce(const IndexRange& positions, ReduceTasks tasks) override {
    cpu_.Reduce(positions, tasks);
  }
  absl::Status Update(const IndexRange& positions, UpdateTasks* tasks) override;

  Counters counters() const;

 private:
  // A record that is open.
  struct OpenRecord {
    bool is_open = false;
    bool is_read = false;  // all of its tasks were taken
    size_t batches = 0;    // that are under way
  };

  explicit DeviceUpdateExecutor(const Options& options)
      : options_(options), cpu_(options.pool, options.undo, options.observer) {}

  // Puts a task into the batch that is being filled.
  void Take(size_t slot, UpdateTask* task, UpdateTasks* tasks);
  // Gives the batch that is being filled to the device, if it has tasks.
  void SubmitBatch(UpdateTasks* tasks);
  // Waits for the oldest batch and stores its results.
  void FinishOldest(UpdateTasks* tasks);
  void CloseIfDone(size_t slot, UpdateTasks* tasks);
  void NoteFailure(const absl::Status& failure);
  void Count(bool is_by_device, uint64_t runs);
  WorkerUndo* undo() const {
    return options_.undo.data() + WorkerPool::CurrentParticipant();
  }
  DeviceBatch& filling() const {
    return *batches_[(oldest_ + under_way_) % batches_.size()];
  }

  const Options options_;
  CpuUpdateExecutor cpu_;
  // A ring: those under way begin at oldest_, and the next one is filled.
  std::vector<std::unique_ptr<DeviceBatch>> batches_;
  std::vector<bool> is_submitted_;  // by batch: the device has it
  size_t oldest_ = 0;
  size_t under_way_ = 0;
  std::array<OpenRecord, 2> records_;  // by slot
  bool is_lost_ = false;
  mutable absl::Mutex mu_;
  Counters counters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_
