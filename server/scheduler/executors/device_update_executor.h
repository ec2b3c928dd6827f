#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/sub_groups.h"
#include "server/observe/trace_recorder.h"
#include "server/scheduler/executors/batch_ring.h"
#include "server/scheduler/executors/cpu_share.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/executors/device_batch.h"
#include "server/scheduler/executors/device_counts.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/device_load.h"
#include "server/scheduler/executors/device_trace.h"
#include "server/scheduler/executors/held_tasks.h"
#include "server/scheduler/executors/kept_parameters.h"
#include "server/scheduler/executors/resident_batch.h"
#include "server/scheduler/executors/resident_records.h"
#include "server/scheduler/executors/shared_gradients.h"
#include "server/scheduler/executors/update_batch.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/executors/whole_batch.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/record_lag.h"
#include "storage/record_view.h"

namespace optstate::scheduler {

// Shares the updates of records between the CPU and devices. A device works
// through a bounded number of bounded batches: while it does, the workers of
// the pool gather the next one, update the CPU's part of the record, and write
// the last one back, with the same undo as the CPU's kernels. A process that is
// killed leaves what it would have left with CpuUpdateExecutor, and, of records
// that stay on devices (ResidentRecords), what the log brings up to date.
// Reductions are the CPU's.
//
// For an optimizer that needs whole parameters these are the tasks, and a batch
// has whole ones alone (WholeBatch). One that no batch has room for is the
// CPU's. Devices keep copies of such records (KeptParameters), which those in
// host memory never lag behind.
//
// A device that fails costs time and no bits: the tasks of its batch are done
// by the CPU's kernels, whose results are equal, and all further ones too when
// the device is lost. So Update() has no errors but those of Open().
//
// Threads: as UpdateExecutor; Share() between two passes; counters() may be
// called by any thread.
// Size: one method for each stage of a batch and of the CPU's part beside it,
// which share the workers and the open records.
class DeviceUpdateExecutor final : public UpdateExecutor,
                                   private storage::RecordLag {
 public:
  // All outlive the executor.
  struct Options {
    WorkerPool* pool = nullptr;
    // As for CpuUpdateExecutor, but at least one slot.
    absl::Span<WorkerUndo> undo;
    StepObserver* observer = nullptr;  // may be null
    // The size of the flat space that its tasks are of; a part of the CPU needs
    // it, but for whole parameters.
    uint64_t flat_elements = 0;
    // Gets what devices do; null: nothing is recorded.
    observe::TraceRecorder* trace = nullptr;
    // The memory of a batch, of the device and pinned on the host, more than
    // its tables take (DeviceBatch or WholeBatch); a task that needs more is
    // done by the CPU. See BatchBytesFor().
    uint64_t batch_bytes = kBatchBytes;
    // The records that may be open at the same time, at least two. Batches have
    // tasks of several, so more are faster. A job on disk has room for two.
    size_t records_max = 2;
  };
  // The records that are to stay on devices.
  struct Residents {
    uint64_t device_bytes = 0;  // of each device; 0: none stay
    // The parameters of a batch of tiles.
    uint64_t batch_bytes = kResidentBytes;
    // These are for tiles alone.
    ResidentRecords::Host host;
    uint64_t turn_elements = kTurnElements;
    // The number of the layout's; needed for whole ones.
    size_t parameters = 0;
  };
  static constexpr uint64_t kBatchBytes = uint64_t{8} << 20;
  // The most that a batch of whole parameters has. With LAMB 4 Mi elements have
  // room.
  static constexpr uint64_t kWholeBatchBytesMax = uint64_t{66} << 20;
  // The parameters in a batch of records that stay, and as many gradients.
  static constexpr uint64_t kResidentBytes = uint64_t{32} << 20;
  // Devices take turns by so many elements: fewer than a batch has, so that all
  // of them work, and enough for a rank to copy what one of them has of a
  // parameter.
  static constexpr uint64_t kTurnElements = 64 * kTileElements;

  using DeviceCounters = DeviceCounts::DeviceCounters;
  using Counters = DeviceCounts::Counters;

  // Until Share() is called the CPU does all.
  explicit DeviceUpdateExecutor(const Options& options);

  // Lets the CPU update this fraction of the elements, as near as whole tiles
  // allow, and the devices the others, in turn; 1: the CPU updates all, and the
  // batches are freed. INVALID_ARGUMENT: there is no device, the batches are
  // too small, the fraction is not in [0, 1], or the flat space is empty;
  // UNIMPLEMENTED, naming it: there is no kernel of the optimizer; other errors
  // are those of the devices' memory and streams. After an error all is as
  // before, but that no record stays on a device. Devices, kernels and the log
  // outlive the executor.
  absl::Status Share(double cpu_fraction, OptimizerKind optimizer,
                     absl::Span<accelerator::Device* const> devices,
                     const DeviceKernels* kernels, const Residents& residents);
  absl::Status Share(double cpu_fraction, OptimizerKind optimizer,
                     absl::Span<accelerator::Device* const> devices,
                     const DeviceKernels* kernels) {
    return Share(cpu_fraction, optimizer, devices, kernels, Residents());
  }
  // Returns Options::batch_bytes for a job of this layout.
  static uint64_t BatchBytesFor(const Layout& layout);
  // Returns the memory of the host that Share() takes with so many devices,
  // without the log. `resident_bytes`: of a batch of records that stay; 0: none
  // do.
  static uint64_t HostBytes(size_t devices, uint64_t resident_bytes,
                            uint64_t batch_bytes = kBatchBytes) {
    return BatchesOf(devices) * batch_bytes +
           kResidentBatches * devices * resident_bytes;
  }
  // Has a device keep the parameters of records that stay there in so much
  // memory besides, for ranks that map it; see ResidentRecords. Between two
  // passes. FAILED_PRECONDITION: no record stays there, or the device is lost.
  absl::StatusOr<DeviceParameters> ShareParameters(size_t device,
                                                   uint64_t bytes,
                                                   uint64_t run_count);
  // The gradients that ranks have on devices, which are those given to Share().
  // Changed between two passes.
  SharedGradients& gradients() { return gradients_; }
  // Gives up the places of records that stay on devices, and, if those in host
  // memory are the only ones (see CatchUpRecords), the log; else the log says
  // what they lack, to whoever replays it.
  void Release();

  storage::RecordLag* lag() override {
    return residents_ == nullptr && kept_ == nullptr ? nullptr : this;
  }
  void DropCopies() override {
    if (residents_ != nullptr) residents_->Drop();
    if (kept_ != nullptr) kept_->Drop();
  }
  bool NeedsRecord(uint64_t run, uint64_t step) override;
  bool IsDue(const SubGroup& sub_group) override {
    return residents_ != nullptr && residents_->IsDue(sub_group);
  }

  absl::Status CanUpdate(const Layout& layout,
                         Accumulation accumulation) const override {
    return cpu_.CanUpdate(layout, accumulation);
  }
  // With devices, tasks of one record are taken while the batches of those
  // before are under way, which pins them.
  size_t slots() const override {
    return std::max(cpu_.slots(), records_.size());
  }
  void Reduce(const IndexRange& positions, ReduceTasks tasks) override {
    cpu_.Reduce(positions, tasks);
  }
  bool HasLeftTasks() const override { return has_left_; }
  absl::Status Update(const IndexRange& positions, UpdateTasks* tasks) override;

  Counters counters() const { return counts_.Get(); }

 private:
  // A record that is open.
  struct OpenRecord {
    bool is_open = false;
    bool is_read = false;  // all of its tasks were taken
    // Batches that have tasks of it and are not done; a part of the CPU's is
    // one.
    size_t batches = 0;
  };
  // Tasks of the CPU, and the slots of their records, each once.
  struct CpuPart {
    HeldTasks held;
    std::vector<size_t> slots;
  };
  using Ring = BatchRing;
  using Slot = BatchRing::Slot;

  // A device has two, while workers gather one and another one is filled.
  static size_t BatchesOf(size_t devices) { return 2 * devices + 2; }
  static constexpr size_t kResidentBatches = 4;  // of a device

  absl::Status ShareAnew(absl::Span<accelerator::Device* const> devices,
                         const Residents& residents);
  // Returns the devices, null in place of those that are lost.
  std::vector<accelerator::Device*> WorkingOf(
      absl::Span<accelerator::Device* const> devices);
  absl::StatusOr<Ring> MakeRing(
      absl::Span<accelerator::Device* const> working) const;
  void CountPlaces();
  // Puts a task into the batch that is being filled, or into the CPU's part.
  void Take(size_t slot, const UpdateTask& task, UpdateTasks* tasks);
  void TakeWhole(size_t slot, const UpdateTask& task, UpdateTasks* tasks);
  // Does so with a task without a record, or leaves it.
  void TakeWithoutRecord(size_t slot, const UpdateTask& task,
                         UpdateTasks* tasks);
  void TakeForCpu(size_t slot, const UpdateTask& task, UpdateTasks* tasks);
  // Notes that a task of the devices' part has become the CPU's.
  void TakeTooLarge(size_t slot, const UpdateTask& task, UpdateTasks* tasks);
  // Returns the tile of a task whose record stays, or is to, on a device that
  // works; null: it has none, and the record in host memory is up to date.
  ResidentTile* TileOf(const UpdateTask& task);
  // Puts a task into a batch of the ring; returns false when it is too large.
  bool Add(size_t slot, const UpdateTask& task, ResidentTile* tile, Ring* ring,
           UpdateTasks* tasks);
  bool AddToBatch(size_t slot, const UpdateTask& task, ResidentTile* tile,
                  UpdateBatch* batch);
  // Has the workers begin with the CPU's part of what was taken: it is done,
  // and records are closed, when EndWork() returns.
  void BeginCpuPart(UpdateTasks* tasks);
  // Gives the batch that is being filled to its device, if it has tasks: the
  // workers begin to gather it, and the device has it when EndWork() returns.
  void SubmitBatch(Ring* ring, UpdateTasks* tasks);
  void BeginGather(Slot* slot, UpdateTasks* tasks);
  void Submit(Slot* slot);
  // Waits for what the workers have begun. Called before they have other work,
  // and before tiles are added.
  void EndWork(UpdateTasks* tasks);
  // Waits for the oldest batch and stores its results.
  void FinishOldest(Ring* ring, UpdateTasks* tasks);
  // Submits and finishes batches until the record is closed.
  void FinishRecord(size_t slot, UpdateTasks* tasks);
  void CloseIfDone(size_t slot, UpdateTasks* tasks);
  // See RecordLag.
  bool Concerns(const SubGroup& sub_group, bool is_written) override {
    if (kept_ != nullptr) return is_written && kept_->Has(sub_group);
    return residents_ != nullptr && residents_->Concerns(sub_group, is_written);
  }
  void MakeCurrent(const storage::RecordView& record, bool is_written) override;
  // A whole parameter's record tells the observer of each run itself.
  void Observe(uint64_t step, uint64_t run) const {
    if (options_.observer == nullptr || is_whole_) return;
    options_.observer->OnRunUpdated(step, run);
  }
  void NoteFailure(size_t device, const absl::Status& failure) {
    if (absl::IsInternal(failure)) is_lost_[device] = true;
    counts_.NoteFailure(device, failure, is_lost_[device]);
  }
  // Lets what devices did in this pass show in their rates.
  void EndPass();
  WorkerUndo* undo() const {
    return options_.undo.data() + WorkerPool::CurrentParticipant();
  }
  bool is_shared() const { return !rings_.empty(); }
  bool IsOnDisk() const { return records_.size() == 2; }
  // Says whether the CPU's part may be of several records: a few tasks are not
  // worth the workers' wake-up, nor is one whole parameter, all that a record
  // may have. On disk a record that waits keeps another one from being read.
  bool CanWaitForOthers() const { return !IsOnDisk() || is_whole_; }

  const Options options_;
  std::optional<DeviceTrace> trace_;  // with Options::trace
  CpuUpdateExecutor cpu_;
  const DeviceKernels* kernels_ = nullptr;
  CpuShare cpu_share_;
  OptimizerKind optimizer_ = OptimizerKind::kAdamW;
  bool is_whole_ = false;  // tasks are of whole parameters
  SharedGradients gradients_;
  // Null: none stay; one of them at most is set.
  std::unique_ptr<ResidentRecords> residents_;
  std::unique_ptr<KeptParameters> kept_;
  // The first one has records of the host, the others, one for each device,
  // those that stay there: no batches, if it was lost before. Empty: the CPU
  // does all.
  std::vector<Ring> rings_;
  std::vector<bool> is_lost_;        // by device
  std::vector<DeviceLoad> loads_;    // by device
  std::vector<OpenRecord> records_;  // by slot
  // One is filled while the other is updated.
  CpuPart cpu_parts_[2];
  size_t filling_ = 0;
  bool has_left_ = false;   // some task of the pass is left
  absl::Mutex callers_mu_;  // one thread that is not the pool's has their slot
  // The workers gather the one, or update the other, while tasks are taken.
  // Null: not that; one of them at most is set.
  Slot* gathered_ = nullptr;
  CpuPart* updated_ = nullptr;
  const std::function<void(size_t)> gather_ = [this](size_t i) {
    gathered_->batch->Gather(i, undo());
  };
  const std::function<void(size_t)> update_ = [this](size_t i) {
    updated_->held.UpdateByCpu(i, undo());
    const UpdateTask& task = updated_->held[i].task;
    Observe(task.step, task.run);
  };
  DeviceCounts counts_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_UPDATE_EXECUTOR_H_
