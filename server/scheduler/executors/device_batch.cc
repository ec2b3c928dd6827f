#include "server/scheduler/executors/device_batch.h"

#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/types/span.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/write_back.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/status_macros.h"
#include "storage/state_scales.h"

namespace optstate::scheduler {
namespace {

using kernels::cuda::TileTask;

constexpr uint64_t kFactorsOffset = HeldTasks::kTasksMax * sizeof(TileTask);
constexpr uint64_t kInputsOffset =
    kFactorsOffset + HeldTasks::kTasksMax * sizeof(kernels::UpdateFactors);

uint64_t BytesOfScales(size_t numel) {
  return (numel + kQuantizedBlockElements - 1) / kQuantizedBlockElements *
         sizeof(float);
}

// Calls visit(bytes, from, array) for each array that the update writes: its
// bytes, its place in `from`, and the pointer to it in `view`. Both views have
// the same arrays.
template <typename Visit>
void ForEachArray(const kernels::UpdateKernelKey& key,
                  const kernels::TileView& from, kernels::TileView* view,
                  const Visit& visit) {
  const size_t numel = from.numel;
  visit(numel * SizeInBytes(key.parameter), from.parameter, &view->parameter);
  if (from.master == from.parameter) {
    view->master = view->parameter;
  } else {
    visit(numel * kernels::scalar::BytesOfMaster(key.master), from.master,
          &view->master);
  }
  for (int k = 0; k < kStateArraysMax; ++k) {
    const bool has_state = from.state[k] != nullptr;
    if (has_state) {
      visit(numel * SizeInBytes(key.state), from.state[k], &view->state[k]);
    }
    if (!has_state || !storage::HasScales(key.state)) {
      // The kernel does not look at it, and it must be no address of the host.
      view->scale[k] = nullptr;
      continue;
    }
    void* scale = view->scale[k];
    visit(BytesOfScales(numel), from.scale[k], &scale);
    view->scale[k] = static_cast<float*>(scale);
  }
}

}  // namespace

uint64_t DeviceBatch::TableBytes() { return kInputsOffset; }

DeviceBatch::DeviceBatch(std::unique_ptr<BatchMemory> memory, uint64_t bytes)
    : bytes_(bytes), memory_(std::move(memory)) {
  places_.reserve(HeldTasks::kTasksMax);
  slots_.reserve(HeldTasks::kTasksMax);
  Clear();
}

absl::StatusOr<std::unique_ptr<DeviceBatch>> DeviceBatch::Make(
    accelerator::Device* device, uint64_t bytes) {
  bytes = bytes / BatchMemory::kAlignBytes * BatchMemory::kAlignBytes;
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<BatchMemory> memory,
                            BatchMemory::Make(device, bytes, bytes));
  return absl::WrapUnique(new DeviceBatch(std::move(memory), bytes));
}

void DeviceBatch::Clear() {
  tasks_.Clear();
  places_.clear();
  slots_.clear();
  elements_ = 0;
  inputs_end_ = kInputsOffset;
  arrays_begin_ = bytes_;
}

template <typename T>
T* DeviceBatch::OnDevice(const T* place) const {
  if (place == nullptr) return nullptr;
  const auto offset = static_cast<uint64_t>(
      reinterpret_cast<const std::byte*>(place) - memory_->host());
  return (memory_->device() + offset).ForKernel<T>();
}

bool DeviceBatch::Add(size_t slot, const UpdateTask& task,
                      ResidentTile* /*tile*/) {
  if (!tasks_.HasRoomFor(task)) return false;
  const kernels::UpdateKernelKey& key = *task.key;
  if (!tasks_.empty() && (key.optimizer != tasks_[0].key.optimizer ||
                          key.options != tasks_[0].key.options)) {
    return false;
  }
  const size_t count = task.view.gradients.size();
  Place place;
  place.gradient_stride =
      BatchMemory::Aligned(task.view.numel * SizeInBytes(key.gradient));
  place.table_offset = inputs_end_;
  place.gradients_offset =
      place.table_offset + BatchMemory::Aligned(count * sizeof(void*));
  const uint64_t inputs_end =
      place.gradients_offset + count * place.gradient_stride;
  // Places the arrays from the back; the room is checked before they are used.
  uint64_t arrays_bytes = 0;
  place.staged = task.view;
  ForEachArray(key, task.view, &place.staged,
               [&](uint64_t bytes, const void* /*from*/, void** /*array*/) {
                 arrays_bytes += BatchMemory::Aligned(bytes);
               });
  if (inputs_end + arrays_bytes > arrays_begin_) return false;
  uint64_t offset = arrays_begin_ - arrays_bytes;
  ForEachArray(key, task.view, &place.staged,
               [&](uint64_t bytes, const void* /*from*/, void** array) {
                 *array = HostAt(offset);
                 offset += BatchMemory::Aligned(bytes);
               });
  arrays_begin_ -= arrays_bytes;
  inputs_end_ = inputs_end;
  elements_ += task.view.numel;
  NoteSlot(slot);
  tasks_.Add(task);
  places_.push_back(place);
  return true;
}

void DeviceBatch::Gather(size_t i, WorkerUndo* /*undo*/) {
  const HeldTasks::Held& held = tasks_[i];
  const Place& place = places_[i];
  const auto gradients = tasks_.gradients(i);
  const size_t count = gradients.size();
  const uint64_t gradient_bytes =
      held.task.view.numel * SizeInBytes(held.key.gradient);
  auto** const table =
      reinterpret_cast<const void**>(HostAt(place.table_offset));
  for (size_t g = 0; g < count; ++g) {
    std::byte* const to =
        HostAt(place.gradients_offset + g * place.gradient_stride);
    std::memcpy(to, gradients[g], gradient_bytes);
    table[g] = OnDevice(to);
  }
  kernels::TileView on_device = place.staged;
  ForEachArray(held.key, held.task.view, &on_device,
               [&](uint64_t bytes, const void* from, void** array) {
                 std::memcpy(*array, from, bytes);
                 *array = OnDevice(static_cast<std::byte*>(*array));
               });
  on_device.gradients = {OnDevice(table), count};
  on_device.undo = nullptr;
  reinterpret_cast<TileTask*>(HostAt(0))[i] = kernels::cuda::TileTaskOf(
      held.key, held.factors, on_device, static_cast<uint32_t>(i));
  reinterpret_cast<kernels::UpdateFactors*>(HostAt(kFactorsOffset))[i] =
      held.factors;
}

absl::Status DeviceBatch::Submit(const DeviceKernels& kernels) {
  accelerator::DeviceStream& stream = *memory_->stream();
  const accelerator::DeviceAddress device = memory_->device();
  const uint64_t arrays_bytes = bytes_to_host();
  memory_->Mark(BatchMemory::Point::kBegin);
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToDevice(device, HostAt(0), inputs_end_));
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToDevice(
      device + arrays_begin_, HostAt(arrays_begin_), arrays_bytes));
  memory_->Mark(BatchMemory::Point::kCopied);
  OPTSTATE_RETURN_IF_ERROR(kernels.Update(
      tasks_[0].key.optimizer, tasks_[0].key.options, device,
      static_cast<uint32_t>(tasks_.size()), device + kFactorsOffset, &stream));
  memory_->Mark(BatchMemory::Point::kComputed);
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToHost(
      HostAt(arrays_begin_), device + arrays_begin_, arrays_bytes));
  return memory_->MarkEnd();
}

bool DeviceBatch::WriteBack(size_t i, WorkerUndo* undo) {
  const HeldTasks::Held& held = tasks_[i];
  const kernels::TileView& staged = places_[i].staged;
  kernels::TileView view = held.task.view;
  if (held.task.undo == UndoPolicy::kNone) {
    view.undo = nullptr;
    kernels::WriteBack(held.key, staged, view);
    held.task.stamp->store(held.task.step, std::memory_order_release);
    return true;
  }
  undo->Begin(UndoKind::kUpdate, held.task.run, held.task.step);
  view.undo = &undo->slot;
  kernels::WriteBack(held.key, staged, view);
  undo->End(held.task.stamp);
  return true;
}

}  // namespace optstate::scheduler
