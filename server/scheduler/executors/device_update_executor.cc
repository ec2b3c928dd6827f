#include "server/scheduler/executors/device_update_executor.h"

#include <algorithm>
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

DeviceUpdateExecutor::DeviceUpdateExecutor(const Options& options)
    : options_(options),
      cpu_(options.pool, options.undo, options.observer),
      records_(options.records_max) {
  for (CpuPart& part : cpu_parts_) part.slots.reserve(options.records_max);
  if (options.trace != nullptr) trace_.emplace(options.trace);
}

absl::Status DeviceUpdateExecutor::Share(
    double cpu_fraction, OptimizerKind optimizer,
    absl::Span<accelerator::Device* const> devices,
    const DeviceKernels* kernels, const Residents& residents) {
  if (!(cpu_fraction >= 0 && cpu_fraction <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the CPU's fraction of updates is ", cpu_fraction, ", not in [0, 1]"));
  }
  Release();
  if (cpu_fraction < 1) {
    OPTSTATE_RETURN_IF_ERROR(kernels->CanUpdate(optimizer));
    const OptimizerInfo& info = InfoOf(optimizer);
    if (info.is_separable && cpu_fraction > 0 && options_.flat_elements == 0) {
      return absl::InvalidArgumentError(
          "the CPU's part of a flat space without elements is not defined");
    }
    // Batches have tasks of one of both kinds.
    if (is_whole_ == info.is_separable) rings_.clear();
    is_whole_ = !info.is_separable;
    optimizer_ = optimizer;
    kernels_ = kernels;
    OPTSTATE_RETURN_IF_ERROR(ShareAnew(devices, residents));
  } else {
    rings_.clear();
  }
  cpu_share_ = CpuShare(cpu_fraction, options_.flat_elements);
  return absl::OkStatus();
}

absl::Status DeviceUpdateExecutor::ShareAnew(
    absl::Span<accelerator::Device* const> devices,
    const Residents& residents) {
  if (!is_shared()) {
    is_lost_.assign(devices.size(), false);
    loads_.assign(devices.size(), DeviceLoad());
    counts_.BeginDevices(devices.size());
  }
  const std::vector<accelerator::Device*> working = WorkingOf(devices);
  std::vector<Ring> rings;
  if (!is_shared()) {
    OPTSTATE_ASSIGN_OR_RETURN(rings.emplace_back(), MakeRing(working));
  }
  std::unique_ptr<ResidentRecords> records;
  std::unique_ptr<KeptParameters> kept;
  if (residents.device_bytes > 0) {
    if (is_whole_) {
      OPTSTATE_ASSIGN_OR_RETURN(
          kept, KeptParameters::Make(working, residents.device_bytes,
                                     residents.parameters));
    } else {
      OPTSTATE_ASSIGN_OR_RETURN(
          records,
          ResidentRecords::Make(working, residents.device_bytes,
                                residents.turn_elements, residents.host));
    }
    const auto make =
        [&](size_t i) -> absl::StatusOr<std::unique_ptr<UpdateBatch>> {
      if (kept != nullptr) {
        return WholeBatch::Make(working[i], optimizer_, options_.batch_bytes,
                                kept.get());
      }
      return ResidentBatch::Make(working[i], records.get(), &gradients_,
                                 residents.batch_bytes);
    };
    for (size_t i = 0; i < working.size(); ++i) {
      const size_t devices_of_ring = working[i] == nullptr ? 0 : 1;
      OPTSTATE_ASSIGN_OR_RETURN(
          rings.emplace_back(),
          Ring::Make(kResidentBatches, {&i, devices_of_ring}, make));
    }
  }
  if (is_shared()) rings.insert(rings.begin(), std::move(rings_.front()));
  rings_ = std::move(rings);
  residents_ = std::move(records);
  kept_ = std::move(kept);
  CountPlaces();
  return absl::OkStatus();
}

// One that is lost fails whatever is asked of it, as long as the engine lives,
// and may have been lost for a former executor.
std::vector<accelerator::Device*> DeviceUpdateExecutor::WorkingOf(
    absl::Span<accelerator::Device* const> devices) {
  std::vector<accelerator::Device*> working(devices.begin(), devices.end());
  for (size_t i = 0; i < working.size(); ++i) {
    const absl::Status status = devices[i]->MakeEvent().status();
    if (absl::IsInternal(status)) NoteFailure(i, status);
    if (is_lost_[i]) working[i] = nullptr;
  }
  return working;
}

absl::StatusOr<DeviceUpdateExecutor::Ring> DeviceUpdateExecutor::MakeRing(
    absl::Span<accelerator::Device* const> working) const {
  const uint64_t table_bytes =
      is_whole_ ? WholeBatch::TableBytes() : DeviceBatch::TableBytes();
  if (working.empty() || options_.batch_bytes <= table_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        working.size(), " devices with batches of ", options_.batch_bytes,
        " bytes: at least one is needed, and more than ", table_bytes,
        " bytes"));
  }
  std::vector<size_t> indices;
  for (size_t i = 0; i < working.size(); ++i) {
    if (working[i] != nullptr) indices.push_back(i);
  }
  if (indices.empty()) {
    return absl::InternalError(
        "the engine has lost all of its devices; the next one may find them");
  }
  return Ring::Make(
      BatchesOf(indices.size()), indices,
      [&](size_t i) -> absl::StatusOr<std::unique_ptr<UpdateBatch>> {
        const uint64_t bytes = options_.batch_bytes;
        if (!is_whole_) return DeviceBatch::Make(working[i], bytes);
        return WholeBatch::Make(working[i], optimizer_, bytes, nullptr);
      });
}

uint64_t DeviceUpdateExecutor::BatchBytesFor(const Layout& layout) {
  if (layout.optimizer_info().is_separable) return kBatchBytes;
  return WholeBatch::BytesFor(layout, kBatchBytes, kWholeBatchBytesMax);
}

// Counts the memory of batches and of records that stay.
void DeviceUpdateExecutor::CountPlaces() {
  counts_.Set([this](Counters& all) {
    for (DeviceCounters& counters : all.devices) {
      counters.batches = 0;
      counters.batch_bytes = 0;
    }
    for (const Ring& ring : rings_) {
      for (const Slot& slot : ring.batches) {
        DeviceCounters& counters = all.devices[slot.device];
        ++counters.batches;
        counters.batch_bytes += slot.batch->bytes();
      }
    }
    all.log_bytes = residents_ != nullptr ? residents_->log_bytes() : 0;
    for (size_t i = 0; i < all.devices.size(); ++i) {
      DeviceCounters& counters = all.devices[i];
      counters.is_lost = is_lost_[i];
      counters.resident_elements = 0;
      counters.resident_bytes = 0;
      counters.shared_bytes = 0;
      if (kept_ != nullptr) {
        counters.resident_elements = kept_->elements(i);
        counters.resident_bytes = kept_->bytes(i);
      } else if (residents_ != nullptr) {
        counters.resident_elements = residents_->elements(i);
        counters.resident_bytes = residents_->bytes(i);
        counters.shared_bytes = residents_->shared_bytes(i);
      }
    }
  });
}

bool DeviceUpdateExecutor::NeedsRecord(uint64_t run, uint64_t step) {
  const ResidentTile* const tile =
      residents_ == nullptr ? nullptr : residents_->Find(run);
  return tile == nullptr || is_lost_[tile->device] ||
         residents_->NeedsRecord(*tile, step);
}

absl::StatusOr<DeviceParameters> DeviceUpdateExecutor::ShareParameters(
    size_t device, uint64_t bytes, uint64_t run_count) {
  if (residents_ == nullptr) {
    return absl::FailedPreconditionError(
        "no record of the job stays on a device: it has no device_budget, or "
        "the CPU updates all");
  }
  if (device >= is_lost_.size() || is_lost_[device]) {
    return absl::FailedPreconditionError(
        absl::StrCat("the engine has lost device ", device));
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      DeviceParameters shared,
      residents_->ShareParameters(device, bytes, run_count));
  CountPlaces();
  return shared;
}

void DeviceUpdateExecutor::Release() {
  if (lag() == nullptr) return;
  rings_.resize(1);
  if (residents_ != nullptr && residents_->AreSettled()) residents_->Forget();
  residents_.reset();
  kept_.reset();
  CountPlaces();
}

void DeviceUpdateExecutor::MakeCurrent(const storage::RecordView& record,
                                       bool is_written) {
  if (kept_ != nullptr && is_written) kept_->Drop(record.sub_group());
  if (residents_ == nullptr) return;
  if (WorkerPool::CurrentParticipant() != 0) {
    return residents_->MakeCurrent(record, is_written, undo());
  }
  const absl::MutexLock lock(&callers_mu_);
  residents_->MakeCurrent(record, is_written, undo());
}

absl::Status DeviceUpdateExecutor::Update(const IndexRange& positions,
                                          UpdateTasks* tasks) {
  has_left_ = false;
  if (!is_shared()) return cpu_.Update(positions, tasks);
  // A copy counts where a device has the same parameters in each pass.
  if (kept_ != nullptr) cpu_share_.BeginPass();
  absl::Status status;
  for (size_t i = positions.begin; i < positions.end; ++i) {
    const size_t slot = i % records_.size();
    FinishRecord(slot, tasks);
    status = tasks->Open(slot, i);
    if (!status.ok()) break;
    records_[slot] = {.is_open = true};
    tasks->ForEachTask(
        slot, [&](const UpdateTask& task) { Take(slot, task, tasks); });
    if (!CanWaitForOthers()) BeginCpuPart(tasks);
    // A device works while the next record is read from disk.
    if (IsOnDisk()) EndWork(tasks);
    records_[slot].is_read = true;
    CloseIfDone(slot, tasks);
  }
  for (size_t slot = 0; slot < records_.size(); ++slot) {
    FinishRecord(slot, tasks);
  }
  EndPass();
  return status;
}

ResidentTile* DeviceUpdateExecutor::TileOf(const UpdateTask& task) {
  ResidentTile* const tile =
      residents_ == nullptr ? nullptr : residents_->Find(task.run);
  if (tile == nullptr) return nullptr;
  if (!is_lost_[tile->device] && residents_->CanStay(task)) return tile;
  // The record in host memory is updated in its place.
  residents_->Settle(task.view, tile, undo());
  return nullptr;
}

// A device may have been lost since the pass began.
void DeviceUpdateExecutor::TakeWithoutRecord(size_t slot,
                                             const UpdateTask& task,
                                             UpdateTasks* tasks) {
  ResidentTile* const tile = residents_->Find(task.run);
  Ring& ring = rings_[1 + tile->device];
  if (!is_lost_[tile->device] && residents_->CanStay(task) &&
      Add(slot, task, tile, &ring, tasks)) {
    return;
  }
  tile->device_step = ResidentTile::kNoStep;
  has_left_ = true;
}

void DeviceUpdateExecutor::TakeWhole(size_t slot, const UpdateTask& task,
                                     UpdateTasks* tasks) {
  if (cpu_share_.Has(task)) return TakeForCpu(slot, task, tasks);
  if (rings_[0].filling().batch->CanHold(task)) {
    const KeptParameter* const kept =
        kept_ == nullptr
            ? nullptr
            : kept_->PlaceOf(task.parameter, *task.whole, is_lost_);
    Ring& ring = rings_[kept != nullptr ? 1 + kept->device : 0];
    if (Add(slot, task, /*tile=*/nullptr, &ring, tasks)) return;
  }
  TakeTooLarge(slot, task, tasks);
}

void DeviceUpdateExecutor::Take(size_t slot, const UpdateTask& task,
                                UpdateTasks* tasks) {
  if (!task.has_record) return TakeWithoutRecord(slot, task, tasks);
  if (is_whole_) return TakeWhole(slot, task, tasks);
  ResidentTile* tile = TileOf(task);
  if (tile == nullptr && cpu_share_.Has(task)) {
    return TakeForCpu(slot, task, tasks);
  }
  if (tile == nullptr && residents_ != nullptr &&
      residents_->Find(task.run) == nullptr && residents_->HasRoomFor(task)) {
    EndWork(tasks);
    tile = residents_->Admit(task);
    if (tile != nullptr && is_lost_[tile->device]) tile = nullptr;
  }
  Ring& ring = tile != nullptr ? rings_[1 + tile->device] : rings_[0];
  if (Add(slot, task, tile, &ring, tasks)) return;
  // A task that is larger than a batch is the CPU's.
  if (tile != nullptr) residents_->Settle(task.view, tile, undo());
  TakeTooLarge(slot, task, tasks);
}

bool DeviceUpdateExecutor::Add(size_t slot, const UpdateTask& task,
                               ResidentTile* tile, Ring* ring,
                               UpdateTasks* tasks) {
  if (AddToBatch(slot, task, tile, ring->filling().batch.get())) return true;
  SubmitBatch(ring, tasks);
  return AddToBatch(slot, task, tile, ring->filling().batch.get());
}

bool DeviceUpdateExecutor::AddToBatch(size_t slot, const UpdateTask& task,
                                      ResidentTile* tile, UpdateBatch* batch) {
  const size_t slots = batch->slots().size();
  if (!batch->Add(slot, task, tile)) return false;
  if (batch->slots().size() > slots) ++records_[slot].batches;
  return true;
}

void DeviceUpdateExecutor::TakeForCpu(size_t slot, const UpdateTask& task,
                                      UpdateTasks* tasks) {
  if (!cpu_parts_[filling_].held.HasRoomFor(task)) BeginCpuPart(tasks);
  CpuPart& part = cpu_parts_[filling_];
  part.held.Add(task);
  if (!part.slots.empty() && part.slots.back() == slot) return;
  part.slots.push_back(slot);
  ++records_[slot].batches;
}

void DeviceUpdateExecutor::TakeTooLarge(size_t slot, const UpdateTask& task,
                                        UpdateTasks* tasks) {
  cpu_share_.Charge(task.view.numel);
  counts_.CountTooLarge(task.view.numel);
  TakeForCpu(slot, task, tasks);
}

void DeviceUpdateExecutor::BeginCpuPart(UpdateTasks* tasks) {
  CpuPart& part = cpu_parts_[filling_];
  if (part.held.empty()) return;
  EndWork(tasks);
  updated_ = &part;
  filling_ = 1 - filling_;
  const size_t size = part.held.size();
  options_.pool->Start({0, size, size}, update_, "update");
}

void DeviceUpdateExecutor::SubmitBatch(Ring* ring, UpdateTasks* tasks) {
  Slot& slot = ring->filling();
  if (slot.batch->size() == 0) return;
  // Another batch must be there to be filled, while the workers gather this
  // one: hence the oldest is finished before.
  if (ring->under_way + 1 == ring->batches.size()) {
    // The CPU has better to do than wait.
    BeginCpuPart(tasks);
    FinishOldest(ring, tasks);
  }
  slot.is_submitted = !is_lost_[slot.device];
  if (slot.is_submitted) BeginGather(&slot, tasks);
  ++ring->under_way;
}

void DeviceUpdateExecutor::BeginGather(Slot* slot, UpdateTasks* tasks) {
  EndWork(tasks);
  gathered_ = slot;
  const size_t size = slot->batch->size();
  options_.pool->Start({0, size, size}, gather_, "update");
}

void DeviceUpdateExecutor::EndWork(UpdateTasks* tasks) {
  if (gathered_ != nullptr) {
    options_.pool->Finish();
    Submit(std::exchange(gathered_, nullptr));
  }
  if (updated_ != nullptr) {
    options_.pool->Finish();
    CpuPart& part = *std::exchange(updated_, nullptr);
    counts_.CountCpu(ElementsOf(part.held));
    part.held.Clear();
    for (const size_t slot : part.slots) {
      --records_[slot].batches;
      CloseIfDone(slot, tasks);
    }
    part.slots.clear();
  }
}

void DeviceUpdateExecutor::Submit(Slot* slot) {
  UpdateBatch& batch = *slot->batch;
  batch.SetTimed(trace_.has_value() && trace_->on());
  const absl::Status status = batch.Submit(*kernels_);
  if (status.ok()) return loads_[slot->device].Begin(NowNs());
  NoteFailure(slot->device, status);
  // Copies that are under way still use the batch.
  const absl::Status drained = batch.Drain();
  if (!drained.ok()) NoteFailure(slot->device, drained);
  slot->is_submitted = false;
}

void DeviceUpdateExecutor::FinishOldest(Ring* ring, UpdateTasks* tasks) {
  EndWork(tasks);
  Slot& oldest = ring->batches[ring->oldest];
  UpdateBatch& batch = *oldest.batch;
  bool is_by_device = oldest.is_submitted;
  if (is_by_device) {
    const absl::Status status = batch.Wait();
    is_by_device = status.ok();
    if (!status.ok()) {
      NoteFailure(oldest.device, status);
      // Copies of the batch may still be under way.
      const absl::Status drained = batch.Drain();
      if (!drained.ok()) NoteFailure(oldest.device, drained);
    }
    loads_[oldest.device].End(
        NowNs(), is_by_device ? batch.elements() : 0,
        is_by_device ? batch.bytes_to_device() + batch.bytes_to_host() : 0);
  }
  const size_t size = batch.size();
  options_.pool->ParallelFor(
      {0, size, size},
      [&](size_t i) {
        const bool is_done = is_by_device ? batch.WriteBack(i, undo())
                                          : batch.UpdateByCpu(i, undo());
        if (is_done) Observe(batch.step(), batch.run(i));
      },
      "update");
  has_left_ = has_left_ || batch.left_elements() > 0;
  if (is_by_device) {
    if (trace_.has_value()) trace_->Record(oldest.device, batch);
    counts_.CountBatch(oldest.device, batch);
  } else {
    counts_.CountCpu(batch.elements() - batch.left_elements());
  }
  for (const size_t slot : batch.slots()) --records_[slot].batches;
  ring->oldest = (ring->oldest + 1) % ring->batches.size();
  --ring->under_way;
  for (const size_t slot : batch.slots()) CloseIfDone(slot, tasks);
  batch.Clear();
}

void DeviceUpdateExecutor::FinishRecord(size_t slot, UpdateTasks* tasks) {
  while (records_[slot].is_open) {
    for (Ring& ring : rings_) {
      if (ring.batches.empty()) continue;
      const auto held = ring.filling().batch->slots();
      if (std::find(held.begin(), held.end(), slot) != held.end()) {
        SubmitBatch(&ring, tasks);
      }
    }
    // The CPU's part, while the devices have theirs.
    BeginCpuPart(tasks);
    for (Ring& ring : rings_) {
      if (ring.under_way > 0) FinishOldest(&ring, tasks);
    }
    EndWork(tasks);
  }
}

void DeviceUpdateExecutor::CloseIfDone(size_t slot, UpdateTasks* tasks) {
  OpenRecord& record = records_[slot];
  if (!record.is_open || !record.is_read || record.batches > 0) return;
  record = OpenRecord();
  tasks->Close(slot);
}

void DeviceUpdateExecutor::EndPass() {
  CountPlaces();
  counts_.Set([this](Counters& counters) {
    for (size_t i = 0; i < loads_.size(); ++i) {
      loads_[i].EndPass();
      counters.devices[i].recent = loads_[i].Recent();
    }
  });
}

}  // namespace optstate::scheduler
