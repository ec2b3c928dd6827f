#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_

#include <algorithm>
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
#include "server/scheduler/executors/device_load.h"
#include "server/scheduler/executors/held_tasks.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// Shares the updates of records that stay on the host between the CPU and
// devices. A device works through a bounded number of bounded batches: while it
// does, the workers of the pool gather the next one, update the CPU's part of
// the record, and write the last one back, with the same undo as the CPU's
// kernels. A process that is killed leaves what it would have left with
// CpuUpdateExecutor. Reductions are the CPU's.
//
// A device that fails costs time and no bits: the tasks of its batch are done
// by the CPU's kernels, whose results are equal, and all further ones too when
// the device is lost. So Update() has no errors but those of Open().
//
// Threads: as UpdateExecutor; Share() between two passes; counters() may be
// called by any thread.
class DeviceUpdateExecutor final : public UpdateExecutor {
 public:
  // All outlive the executor.
  struct Options {
    WorkerPool* pool = nullptr;
    // As for CpuUpdateExecutor, but at least one slot.
    absl::Span<WorkerUndo> undo;
    StepObserver* observer = nullptr;  // may be null
    // The memory of a batch, of the device and pinned on the host, more than
    // DeviceBatch::TableBytes(); a task that needs more is done by the CPU.
    uint64_t batch_bytes = kBatchBytes;
  };
  static constexpr uint64_t kBatchBytes = uint64_t{8} << 20;

  // Counts the work of one device since Share() gave it its batches.
  struct DeviceCounters {
    size_t batches = 0;
    uint64_t batch_bytes = 0;  // of all; as many are pinned on the host
    uint64_t elements = 0;     // that it has updated
    uint64_t bytes_to_device = 0;
    uint64_t bytes_to_host = 0;
    DeviceLoad::Work recent;
    // Why it did not do a batch, last.
    absl::Status failure;
    bool is_lost = false;
  };
  struct Counters {
    uint64_t device_elements = 0;
    uint64_t cpu_elements = 0;
    // Why a device did not do a batch, last; INTERNAL: it is lost.
    absl::Status failure;
    std::vector<DeviceCounters> devices;  // as given to Share()
  };

  // Until Share() is called the CPU does all.
  explicit DeviceUpdateExecutor(const Options& options)
      : options_(options), cpu_(options.pool, options.undo, options.observer) {}

  // Lets the CPU update this fraction of the elements, as near as whole tiles
  // allow, and the devices the others, in turn; 1: the CPU updates all, and the
  // batches are freed. INVALID_ARGUMENT: there is no device, the batches are
  // too small, or the fraction is not in [0, 1]; UNIMPLEMENTED, naming it:
  // there is no kernel of the optimizer; other errors are those of the devices'
  // memory and streams. After an error all is as before. Devices and kernels
  // outlive the executor.
  absl::Status Share(double cpu_fraction, OptimizerKind optimizer,
                     absl::Span<accelerator::Device* const> devices,
                     const DeviceKernels* kernels);
  // Returns the memory of the host that Share() takes with so many devices.
  static uint64_t HostBytes(size_t devices) {
    return BatchesOf(devices) * kBatchBytes;
  }

  absl::Status CanUpdate(const Layout& layout,
                         Accumulation accumulation) const override {
    return cpu_.CanUpdate(layout, accumulation);
  }
  // With devices, tasks of one record are taken while the batches of the one
  // before are under way. That pins two records: a job on disk has three frames
  // at least.
  size_t slots() const override {
    return std::max(cpu_.slots(), records_.size());
  }
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
  // A batch and its device.
  struct Slot {
    std::unique_ptr<DeviceBatch> batch;
    size_t device = 0;          // index
    bool is_submitted = false;  // the device has it
  };

  // One more than are under way, which is filled.
  static size_t BatchesOf(size_t devices) { return 2 * devices + 1; }

  absl::StatusOr<std::vector<Slot>> MakeBatches(
      absl::Span<accelerator::Device* const> devices) const;
  // Returns whether the next task, of so many elements, is the CPU's.
  bool IsForCpu(size_t numel);
  // Puts a task into the batch that is being filled, or into the CPU's part.
  void Take(size_t slot, const UpdateTask& task, UpdateTasks* tasks);
  void TakeForCpu(const UpdateTask& task);
  // Does the CPU's part of the record that is being read.
  void UpdateCpuPart();
  // Gives the batch that is being filled to its device, if it has tasks.
  void SubmitBatch(UpdateTasks* tasks);
  // Waits for the oldest batch and stores its results.
  void FinishOldest(UpdateTasks* tasks);
  void CloseIfDone(size_t slot, UpdateTasks* tasks);
  // Does tasks by the CPU's kernels, on all workers.
  void UpdateByCpu(const HeldTasks& held);
  void Observe(const UpdateTask& task) const;
  void NoteFailure(size_t device, const absl::Status& failure);
  // Counts what a device has done.
  void CountBatch(size_t device, const DeviceBatch& batch);
  void CountCpu(const HeldTasks& held);
  // Lets what devices did in this pass show in their rates.
  void EndPass();
  WorkerUndo* undo() const {
    return options_.undo.data() + WorkerPool::CurrentParticipant();
  }
  Slot& filling() { return batches_[(oldest_ + under_way_) % batches_.size()]; }

  const Options options_;
  CpuUpdateExecutor cpu_;
  const DeviceKernels* kernels_ = nullptr;
  double cpu_fraction_ = 1;
  // A ring: those under way begin at oldest_, and the next one is filled.
  std::vector<Slot> batches_;
  size_t oldest_ = 0;
  size_t under_way_ = 0;
  std::vector<bool> is_lost_;          // by device
  std::vector<DeviceLoad> loads_;      // by device
  std::array<OpenRecord, 2> records_;  // by slot
  HeldTasks cpu_part_;
  // Elements of tasks so far, of all and of those that were the CPU's.
  uint64_t elements_ = 0;
  uint64_t cpu_elements_ = 0;
  mutable absl::Mutex mu_;
  Counters counters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_
