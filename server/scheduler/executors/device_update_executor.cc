#include "server/scheduler/executors/device_update_executor.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::scheduler {
namespace {

int64_t NowNs() {
  return std::chrono::nanoseconds(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

uint64_t ElementsOf(const HeldTasks& held) {
  uint64_t elements = 0;
  for (size_t i = 0; i < held.size(); ++i) elements += held[i].task.view.numel;
  return elements;
}

}  // namespace

absl::Status DeviceUpdateExecutor::Share(
    double cpu_fraction, OptimizerKind optimizer,
    absl::Span<accelerator::Device* const> devices,
    const DeviceKernels* kernels) {
  if (!(cpu_fraction >= 0 && cpu_fraction <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the CPU's fraction of updates is ", cpu_fraction, ", not in [0, 1]"));
  }
  if (cpu_fraction < 1 && batches_.empty()) {
    OPTSTATE_RETURN_IF_ERROR(kernels->CanUpdate(optimizer));
    OPTSTATE_ASSIGN_OR_RETURN(batches_, MakeBatches(devices));
    kernels_ = kernels;
    oldest_ = 0;
    is_lost_.assign(devices.size(), false);
    loads_.assign(devices.size(), DeviceLoad());
    const absl::MutexLock lock(&mu_);
    counters_.devices.assign(devices.size(), DeviceCounters());
    for (const Slot& slot : batches_) {
      DeviceCounters& counters = counters_.devices[slot.device];
      ++counters.batches;
      counters.batch_bytes += slot.batch->bytes();
    }
  }
  if (cpu_fraction == 1) batches_.clear();
  cpu_fraction_ = cpu_fraction;
  elements_ = 0;
  cpu_elements_ = 0;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<DeviceUpdateExecutor::Slot>>
DeviceUpdateExecutor::MakeBatches(
    absl::Span<accelerator::Device* const> devices) const {
  if (devices.empty() || options_.batch_bytes <= DeviceBatch::TableBytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        devices.size(), " devices with batches of ", options_.batch_bytes,
        " bytes: at least one is needed, and more than ",
        DeviceBatch::TableBytes(), " bytes"));
  }
  std::vector<Slot> batches(BatchesOf(devices.size()));
  for (size_t i = 0; i < batches.size(); ++i) {
    batches[i].device = i % devices.size();
    OPTSTATE_ASSIGN_OR_RETURN(
        batches[i].batch,
        DeviceBatch::Make(devices[batches[i].device], options_.batch_bytes));
  }
  return batches;
}

absl::Status DeviceUpdateExecutor::Update(const IndexRange& positions,
                                          UpdateTasks* tasks) {
  if (batches_.empty()) return cpu_.Update(positions, tasks);
  absl::Status status;
  for (size_t i = positions.begin; i < positions.end; ++i) {
    const size_t slot = i % records_.size();
    while (records_[slot].is_open) FinishOldest(tasks);
    status = tasks->Open(slot, i);
    if (!status.ok()) break;
    records_[slot] = {.is_open = true};
    tasks->ForEachTask(
        slot, [&](const UpdateTask& task) { Take(slot, task, tasks); });
    SubmitBatch(tasks);
    UpdateCpuPart();
    records_[slot].is_read = true;
    CloseIfDone(slot, tasks);
  }
  while (under_way_ > 0) FinishOldest(tasks);
  EndPass();
  return status;
}

// Keeps the CPU's part of the tasks so far as near to its fraction as it can.
bool DeviceUpdateExecutor::IsForCpu(size_t numel) {
  elements_ += numel;
  const double with_this =
      static_cast<double>(cpu_elements_) + static_cast<double>(numel) / 2;
  if (with_this > cpu_fraction_ * static_cast<double>(elements_)) return false;
  cpu_elements_ += numel;
  return true;
}

void DeviceUpdateExecutor::Take(size_t slot, const UpdateTask& task,
                                UpdateTasks* tasks) {
  if (IsForCpu(task.view.numel)) return TakeForCpu(task);
  if (filling().batch->Add(slot, task)) return;
  SubmitBatch(tasks);
  // A task that is larger than a batch is the CPU's.
  if (!filling().batch->Add(slot, task)) TakeForCpu(task);
}

void DeviceUpdateExecutor::TakeForCpu(const UpdateTask& task) {
  if (!cpu_part_.HasRoomFor(task)) UpdateCpuPart();
  cpu_part_.Add(task);
}

void DeviceUpdateExecutor::UpdateCpuPart() {
  if (cpu_part_.empty()) return;
  UpdateByCpu(cpu_part_);
  cpu_part_.Clear();
}

void DeviceUpdateExecutor::SubmitBatch(UpdateTasks* tasks) {
  Slot& slot = filling();
  DeviceBatch& batch = *slot.batch;
  if (batch.tasks().empty()) return;
  slot.is_submitted = !is_lost_[slot.device];
  if (slot.is_submitted) {
    options_.pool->ParallelFor(batch.tasks().size(),
                               [&](size_t i) { batch.Gather(i); });
    const absl::Status status = batch.Submit(*kernels_);
    if (!status.ok()) {
      NoteFailure(slot.device, status);
      // Copies that are under way still use the batch.
      const absl::Status drained = batch.Drain();
      if (!drained.ok()) NoteFailure(slot.device, drained);
      slot.is_submitted = false;
    } else {
      loads_[slot.device].Begin(NowNs());
    }
  }
  ++records_[batch.slot()].batches;
  ++under_way_;
  if (under_way_ < batches_.size()) return;
  // One batch must be there to be filled. The CPU has better to do than wait.
  UpdateCpuPart();
  FinishOldest(tasks);
}

void DeviceUpdateExecutor::FinishOldest(UpdateTasks* tasks) {
  Slot& oldest = batches_[oldest_];
  DeviceBatch& batch = *oldest.batch;
  bool is_by_device = oldest.is_submitted;
  if (is_by_device) {
    const absl::Status status = batch.Wait();
    is_by_device = status.ok();
    if (!status.ok()) NoteFailure(oldest.device, status);
    loads_[oldest.device].End(
        NowNs(), is_by_device ? ElementsOf(batch.tasks()) : 0,
        is_by_device ? batch.bytes_to_device() + batch.bytes_to_host() : 0);
  }
  if (is_by_device) {
    options_.pool->ParallelFor(batch.tasks().size(), [&](size_t i) {
      batch.WriteBack(i, undo());
      Observe(batch.tasks()[i].task);
    });
    CountBatch(oldest.device, batch);
  } else {
    UpdateByCpu(batch.tasks());
  }
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

void DeviceUpdateExecutor::UpdateByCpu(const HeldTasks& held) {
  options_.pool->ParallelFor(held.size(), [&](size_t i) {
    held.UpdateByCpu(i, undo());
    Observe(held[i].task);
  });
  CountCpu(held);
}

void DeviceUpdateExecutor::Observe(const UpdateTask& task) const {
  if (options_.observer != nullptr) {
    options_.observer->OnRunUpdated(task.step, task.run);
  }
}

void DeviceUpdateExecutor::NoteFailure(size_t device,
                                       const absl::Status& failure) {
  if (absl::IsInternal(failure)) is_lost_[device] = true;
  const absl::MutexLock lock(&mu_);
  counters_.failure = failure;
  counters_.devices[device].failure = failure;
  counters_.devices[device].is_lost = is_lost_[device];
}

void DeviceUpdateExecutor::CountBatch(size_t device, const DeviceBatch& batch) {
  const uint64_t elements = ElementsOf(batch.tasks());
  const absl::MutexLock lock(&mu_);
  counters_.device_elements += elements;
  DeviceCounters& counters = counters_.devices[device];
  counters.elements += elements;
  counters.bytes_to_device += batch.bytes_to_device();
  counters.bytes_to_host += batch.bytes_to_host();
}

void DeviceUpdateExecutor::CountCpu(const HeldTasks& held) {
  const absl::MutexLock lock(&mu_);
  counters_.cpu_elements += ElementsOf(held);
}

void DeviceUpdateExecutor::EndPass() {
  const absl::MutexLock lock(&mu_);
  for (size_t i = 0; i < loads_.size(); ++i) {
    loads_[i].EndPass();
    counters_.devices[i].recent = loads_[i].Recent();
  }
}

DeviceUpdateExecutor::Counters DeviceUpdateExecutor::counters() const {
  const absl::MutexLock lock(&mu_);
  return counters_;
}

}  // namespace optstate::scheduler
