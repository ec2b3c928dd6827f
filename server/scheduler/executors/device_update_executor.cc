#include "server/scheduler/executors/device_update_executor.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/executors/cpu_tile.h"

namespace optstate::scheduler {

absl::StatusOr<std::unique_ptr<DeviceUpdateExecutor>>
DeviceUpdateExecutor::Create(const Options& options) {
  if (options.batches == 0 ||
      options.batch_bytes <= DeviceBatch::TableBytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.batches, " batches of ", options.batch_bytes,
        " bytes for a device: at least one is needed, of more than ",
        DeviceBatch::TableBytes(), " bytes"));
  }
  std::unique_ptr<DeviceUpdateExecutor> executor(
      new DeviceUpdateExecutor(options));
  for (size_t i = 0; i < options.batches; ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(
        std::unique_ptr<DeviceBatch> batch,
        DeviceBatch::Make(options.device, options.batch_bytes));
    executor->batches_.push_back(std::move(batch));
  }
  executor->is_submitted_.resize(options.batches);
  return executor;
}

absl::Status DeviceUpdateExecutor::CanUpdate(const Layout& layout,
                                             Accumulation accumulation) const {
  OPTSTATE_RETURN_IF_ERROR(cpu_.CanUpdate(layout, accumulation));
  return options_.kernels->CanUpdate(layout.optimizer());
}

absl::Status DeviceUpdateExecutor::Update(const IndexRange& positions,
                                          UpdateTasks* tasks) {
  absl::Status status;
  for (size_t i = positions.begin; i < positions.end; ++i) {
    const size_t slot = i % records_.size();
    while (records_[slot].is_open) FinishOldest(tasks);
    status = tasks->Open(slot, i);
    if (!status.ok()) break;
    records_[slot] = {.is_open = true};
    tasks->ForEachTask(slot,
                       [&](UpdateTask& task) { Take(slot, &task, tasks); });
    SubmitBatch(tasks);
    records_[slot].is_read = true;
    CloseIfDone(slot, tasks);
  }
  while (under_way_ > 0) FinishOldest(tasks);
  return status;
}

void DeviceUpdateExecutor::Take(size_t slot, UpdateTask* task,
                                UpdateTasks* tasks) {
  if (filling().Add(slot, *task)) return;
  SubmitBatch(tasks);
  if (filling().Add(slot, *task)) return;
  // The task alone is larger than a batch. No worker is at work now.
  UpdateOnCpu(*task, options_.undo.data());
  if (options_.observer != nullptr) {
    options_.observer->OnRunUpdated(task->step, task->run);
  }
  Count(/*is_by_device=*/false, 1);
}

void DeviceUpdateExecutor::SubmitBatch(UpdateTasks* tasks) {
  DeviceBatch& batch = filling();
  if (batch.size() == 0) return;
  bool is_submitted = !is_lost_;
  if (is_submitted) {
    options_.pool->ParallelFor(batch.size(),
                               [&](size_t i) { batch.Gather(i); });
    const absl::Status status = batch.Submit(*options_.kernels);
    if (!status.ok()) {
      NoteFailure(status);
      // Copies that are under way still use the batch.
      const absl::Status drained = batch.Drain();
      if (!drained.ok()) NoteFailure(drained);
      is_submitted = false;
    }
  }
  is_submitted_[(oldest_ + under_way_) % batches_.size()] = is_submitted;
  ++records_[batch.slot()].batches;
  ++under_way_;
  // One batch must be there to be filled.
  if (under_way_ == batches_.size()) FinishOldest(tasks);
}

void DeviceUpdateExecutor::FinishOldest(UpdateTasks* tasks) {
  DeviceBatch& batch = *batches_[oldest_];
  bool is_by_device = is_submitted_[oldest_];
  if (is_by_device) {
    const absl::Status status = batch.Wait();
    is_by_device = status.ok();
    if (!status.ok()) NoteFailure(status);
  }
  options_.pool->ParallelFor(batch.size(), [&](size_t i) {
    if (is_by_device) {
      batch.WriteBack(i, undo());
    } else {
      batch.UpdateByCpu(i, undo());
    }
    if (options_.observer != nullptr) {
      options_.observer->OnRunUpdated(batch.task(i).step, batch.task(i).run);
    }
  });
  Count(is_by_device, batch.size());
  const size_t slot = batch.slot();
  batch.Clear();
  oldest_ = (oldest_ + 1) % batches_.size();
  --under_way_;
  --records_[slot].batches;
  CloseIfDone(slot, tasks);
}

void DeviceUpdateExecutor::CloseIfDone(size_t slot, UpdateTasks* tasks) {
  OpenRecord& record = records_[slot];
  if (!record.is_open || !record.is_read || record.batches > 0) return;
  record = OpenRecord();
  tasks->Close(slot);
}

void DeviceUpdateExecutor::NoteFailure(const absl::Status& failure) {
  if (absl::IsInternal(failure)) is_lost_ = true;
  const absl::MutexLock lock(&mu_);
  counters_.failure = failure;
}

void DeviceUpdateExecutor::Count(bool is_by_device, uint64_t runs) {
  const absl::MutexLock lock(&mu_);
  (is_by_device ? counters_.device_runs : counters_.cpu_runs) += runs;
}

DeviceUpdateExecutor::Counters DeviceUpdateExecutor::counters() const {
  const absl::MutexLock lock(&mu_);
  return counters_;
}

}  // namespace optstate::scheduler
