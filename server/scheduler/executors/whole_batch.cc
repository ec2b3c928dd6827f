#include "server/scheduler/executors/whole_batch.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/whole_shape.h"
#include "proto/types/status_macros.h"

namespace optstate::scheduler {
namespace {

using kernels::DescentFactors;
using kernels::cuda::WholeTask;

constexpr uint64_t kDescentsOffset = HeldTasks::kTasksMax * sizeof(WholeTask);
constexpr uint64_t kInputsOffset =
    kDescentsOffset + HeldTasks::kTasksMax * sizeof(DescentFactors);
static_assert(kInputsOffset % BatchMemory::kAlignBytes == 0);

uint64_t AlignedFloats(uint64_t elements) {
  return BatchMemory::Aligned(elements * sizeof(float));
}

// An optimizer has one of both.
uint64_t BytesOfScratch(OptimizerKind optimizer,
                        absl::Span<const int64_t> shape) {
  return BatchMemory::Aligned(kernels::cuda::MeansOf(optimizer, shape) *
                              sizeof(double)) +
         AlignedFloats(kernels::cuda::ScratchOf(optimizer, shape));
}

}  // namespace

uint64_t WholeBatch::TableBytes() { return kInputsOffset; }

WholeBatch::Need WholeBatch::NeedOf(OptimizerKind optimizer,
                                    const WholeParameter& parameter) {
  const uint64_t floats = AlignedFloats(kernels::NumelOf(parameter.shape));
  Need need;
  need.front = floats;
  need.back = floats;
  need.scratch = BytesOfScratch(optimizer, parameter.shape);
  for (const uint64_t elements : parameter.state_elements) {
    need.back += AlignedFloats(elements);
  }
  return need;
}

uint64_t WholeBatch::BytesFor(const Layout& layout, uint64_t bytes_min,
                              uint64_t bytes_max) {
  uint64_t bytes = bytes_min;
  for (const ParameterSpec& spec : layout.parameters()) {
    WholeParameter parameter;
    parameter.shape = spec.shape;
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!layout.has_state_array(k, spec.group)) continue;
      parameter.state_elements[k] =
          StateElements(layout.optimizer_info(), k, spec.shape);
    }
    const Need need = NeedOf(layout.optimizer(), parameter);
    bytes = std::max(bytes, kInputsOffset + need.front + need.back);
  }
  return std::min(bytes, bytes_max);
}

WholeBatch::WholeBatch(std::unique_ptr<BatchMemory> memory, uint64_t bytes,
                       uint64_t device_bytes)
    : bytes_(bytes), device_bytes_(device_bytes), memory_(std::move(memory)) {
  places_.reserve(HeldTasks::kTasksMax);
  slots_.reserve(HeldTasks::kTasksMax);
  Clear();
}

absl::StatusOr<std::unique_ptr<WholeBatch>> WholeBatch::Make(
    accelerator::Device* device, OptimizerKind optimizer, uint64_t bytes) {
  bytes = bytes / BatchMemory::kAlignBytes * BatchMemory::kAlignBytes;
  const uint64_t device_bytes =
      kernels::cuda::NeedsScratch(optimizer) ? 2 * bytes : bytes;
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<BatchMemory> memory,
                            BatchMemory::Make(device, bytes, device_bytes));
  return absl::WrapUnique(
      new WholeBatch(std::move(memory), bytes, device_bytes));
}

void WholeBatch::Clear() {
  tasks_.Clear();
  places_.clear();
  slots_.clear();
  elements_ = 0;
  inputs_end_ = kInputsOffset;
  arrays_begin_ = bytes_;
  scratch_end_ = bytes_;
}

float* WholeBatch::OnDevice(const float* place) const {
  if (place == nullptr) return nullptr;
  const auto offset = static_cast<uint64_t>(
      reinterpret_cast<const std::byte*>(place) - memory_->host());
  return (memory_->device() + offset).ForKernel<float>();
}

bool WholeBatch::CanHold(const UpdateTask& task) const {
  const Need need =
      NeedOf(task.key->optimizer, task.whole->Describe(task.parameter));
  return kInputsOffset + need.front + need.back <= bytes_ &&
         bytes_ + need.scratch <= device_bytes_;
}

bool WholeBatch::Add(size_t slot, const UpdateTask& task,
                     ResidentTile* /*tile*/) {
  if (!tasks_.HasRoomFor(task)) return false;
  const OptimizerKind optimizer = task.key->optimizer;
  if (!tasks_.empty() && optimizer != tasks_[0].key.optimizer) return false;
  const WholeParameter parameter = task.whole->Describe(task.parameter);
  const Need need = NeedOf(optimizer, parameter);
  if (inputs_end_ + need.front + need.back > arrays_begin_ ||
      scratch_end_ + need.scratch > device_bytes_) {
    return false;
  }
  const uint64_t floats = AlignedFloats(task.view.numel);
  Place place;
  place.arrays.gradient = FloatsAt(inputs_end_);
  inputs_end_ += need.front;
  place.scratch_offset = scratch_end_;
  scratch_end_ += need.scratch;
  arrays_begin_ -= need.back;
  place.arrays.master = FloatsAt(arrays_begin_);
  uint64_t offset = arrays_begin_ + floats;
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (parameter.state_elements[k] == 0) continue;
    place.arrays.state[k] = FloatsAt(offset);
    offset += AlignedFloats(parameter.state_elements[k]);
  }
  elements_ += task.view.numel;
  NoteSlot(slot);
  tasks_.Add(task);
  places_.push_back(place);
  return true;
}

void WholeBatch::Gather(size_t i, WorkerUndo* /*undo*/) {
  const HeldTasks::Held& held = tasks_[i];
  const Place& place = places_[i];
  const WholeRecord& record = *held.task.whole;
  record.Gather(held.task.parameter, place.arrays);
  const WholeParameter parameter = record.Describe(held.task.parameter);
  const OptimizerKind optimizer = held.key.optimizer;
  WholeTask task =
      kernels::cuda::WholeTaskOf(optimizer, parameter.input, parameter.shape);
  task.gradient = OnDevice(place.arrays.gradient);
  task.master = OnDevice(place.arrays.master);
  for (int k = 0; k < kStateArraysMax; ++k) {
    task.state[k] = OnDevice(place.arrays.state[k]);
  }
  const accelerator::DeviceAddress scratch =
      memory_->device() + place.scratch_offset;
  if (kernels::cuda::MeansOf(optimizer, parameter.shape) > 0) {
    task.means = scratch.ForKernel<double>();
  }
  if (kernels::cuda::ScratchOf(optimizer, parameter.shape) > 0) {
    task.scratch = scratch.ForKernel<float>();
  }
  const uint64_t descent_offset = kDescentsOffset + i * sizeof(DescentFactors);
  task.descent =
      (memory_->device() + descent_offset).ForKernel<DescentFactors>();
  reinterpret_cast<WholeTask*>(HostAt(0))[i] = task;
}

absl::Status WholeBatch::Submit(const DeviceKernels& kernels) {
  accelerator::DeviceStream& stream = *memory_->stream();
  const accelerator::DeviceAddress device = memory_->device();
  const uint64_t arrays_bytes = bytes_to_host();
  const auto* const table = reinterpret_cast<const WholeTask*>(HostAt(0));
  const uint32_t rounds =
      optstate::kernels::cuda::RoundsOf({table, tasks_.size()});
  memory_->Mark(BatchMemory::Point::kBegin);
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToDevice(device, HostAt(0), inputs_end_));
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToDevice(
      device + arrays_begin_, HostAt(arrays_begin_), arrays_bytes));
  memory_->Mark(BatchMemory::Point::kCopied);
  OPTSTATE_RETURN_IF_ERROR(kernels.UpdateWhole(
      tasks_[0].key.optimizer, device, static_cast<uint32_t>(tasks_.size()),
      rounds, &stream));
  memory_->Mark(BatchMemory::Point::kComputed);
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToHost(
      HostAt(arrays_begin_), device + arrays_begin_, arrays_bytes));
  return memory_->MarkEnd();
}

bool WholeBatch::WriteBack(size_t i, WorkerUndo* /*undo*/) {
  const UpdateTask& task = tasks_[i].task;
  task.whole->WriteBack(task.parameter, places_[i].arrays);
  return true;
}

}  // namespace optstate::scheduler
