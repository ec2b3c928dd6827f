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
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    bytes = std::max(bytes,
                     BytesOf(layout.optimizer(), WholeParameterOf(layout, p)));
  }
  return std::min(bytes, bytes_max);
}

uint64_t WholeBatch::BytesOf(OptimizerKind optimizer,
                             const WholeParameter& parameter) {
  const Need need = NeedOf(optimizer, parameter);
  return kInputsOffset + need.front + need.back;
}

WholeBatch::WholeBatch(std::unique_ptr<BatchMemory> memory, uint64_t bytes,
                       uint64_t device_bytes, KeptParameters* kept)
    : bytes_(bytes),
      device_bytes_(device_bytes),
      memory_(std::move(memory)),
      kept_(kept) {
  places_.reserve(HeldTasks::kTasksMax);
  pieces_.reserve(2 * HeldTasks::kTasksMax);
  slots_.reserve(HeldTasks::kTasksMax);
  Clear();
}

absl::StatusOr<std::unique_ptr<WholeBatch>> WholeBatch::Make(
    accelerator::Device* device, OptimizerKind optimizer, uint64_t bytes,
    KeptParameters* kept) {
  bytes = bytes / BatchMemory::kAlignBytes * BatchMemory::kAlignBytes;
  const uint64_t device_bytes =
      kernels::cuda::NeedsScratch(optimizer) ? 2 * bytes : bytes;
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<BatchMemory> memory,
                            BatchMemory::Make(device, bytes, device_bytes));
  return absl::WrapUnique(
      new WholeBatch(std::move(memory), bytes, device_bytes, kept));
}

void WholeBatch::Clear() {
  tasks_.Clear();
  places_.clear();
  slots_.clear();
  elements_ = 0;
  inputs_end_ = kInputsOffset;
  arrays_begin_ = bytes_;
  scratch_end_ = bytes_;
  bytes_to_device_ = 0;
}

accelerator::DeviceAddress WholeBatch::OnDevice(const Place& place,
                                                uint64_t offset) const {
  return place.kept != nullptr && offset < place.kept_end
             ? place.kept->memory + (offset - place.begin)
             : OnDevice(offset);
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
  place.end = arrays_begin_;
  arrays_begin_ -= need.back;
  place.begin = arrays_begin_;
  place.arrays.master = FloatsAt(arrays_begin_);
  uint64_t offset = arrays_begin_ + floats;
  const auto add_states = [&](bool keeps_floats) {
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (parameter.state_elements[k] == 0 ||
          parameter.keeps_floats[k] != keeps_floats) {
        continue;
      }
      place.arrays.state[k] = FloatsAt(offset);
      offset += AlignedFloats(parameter.state_elements[k]);
    }
  };
  add_states(/*keeps_floats=*/true);
  place.kept_end = offset;
  add_states(/*keeps_floats=*/false);
  if (kept_ != nullptr) place.kept = kept_->Find(task.parameter);
  elements_ += task.view.numel;
  NoteSlot(slot);
  tasks_.Add(task);
  places_.push_back(place);
  return true;
}

void WholeBatch::Gather(size_t i, WorkerUndo* /*undo*/) {
  const HeldTasks::Held& held = tasks_[i];
  Place& place = places_[i];
  const WholeRecord& record = *held.task.whole;
  WholeArrays gathered = place.arrays;
  if (place.kept != nullptr) {
    place.is_current = place.kept->step.load(std::memory_order_relaxed) ==
                       held.task.stamp->load(std::memory_order_relaxed);
    // From here on the device may be writing there.
    place.kept->Drop();
  }
  if (place.is_current) {
    const auto leave_out = [&](float** array) {
      if (*array != nullptr && OffsetOf(*array) < place.kept_end) {
        *array = nullptr;
      }
    };
    leave_out(&gathered.master);
    for (float*& state : gathered.state) leave_out(&state);
  }
  record.Gather(held.task.parameter, gathered);
  const WholeParameter parameter = record.Describe(held.task.parameter);
  const OptimizerKind optimizer = held.key.optimizer;
  WholeTask task =
      kernels::cuda::WholeTaskOf(optimizer, parameter.input, parameter.shape);
  task.gradient = OnDevice(OffsetOf(place.arrays.gradient)).ForKernel<float>();
  task.master = OnDevice(place, place.begin).ForKernel<float>();
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (place.arrays.state[k] == nullptr) continue;
    task.state[k] =
        OnDevice(place, OffsetOf(place.arrays.state[k])).ForKernel<float>();
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

// Tasks are in the order of falling offsets, in the buffer and, as a rule,
// among the copies.
void WholeBatch::AddPiece(uint64_t begin, uint64_t end,
                          accelerator::DeviceAddress device) {
  if (begin == end) return;
  const uint64_t bytes = end - begin;
  if (!pieces_.empty() && pieces_.back().host_offset == end &&
      pieces_.back().device == device + bytes) {
    pieces_.back().host_offset = begin;
    pieces_.back().device = device;
    pieces_.back().bytes += bytes;
    return;
  }
  pieces_.push_back({begin, device, bytes});
}

void WholeBatch::ListPieces(bool with_current) {
  pieces_.clear();
  for (const Place& place : places_) {
    AddPiece(place.kept_end, place.end, OnDevice(place, place.kept_end));
    if (place.is_current && !with_current) continue;
    AddPiece(place.begin, place.kept_end, OnDevice(place, place.begin));
  }
}

absl::Status WholeBatch::Submit(const DeviceKernels& kernels) {
  accelerator::DeviceStream& stream = *memory_->stream();
  const accelerator::DeviceAddress device = memory_->device();
  const auto* const table = reinterpret_cast<const WholeTask*>(HostAt(0));
  const uint32_t rounds =
      optstate::kernels::cuda::RoundsOf({table, tasks_.size()});
  memory_->Mark(BatchMemory::Point::kBegin);
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToDevice(device, HostAt(0), inputs_end_));
  bytes_to_device_ = inputs_end_;
  ListPieces(/*with_current=*/false);
  for (const Piece& piece : pieces_) {
    bytes_to_device_ += piece.bytes;
    OPTSTATE_RETURN_IF_ERROR(stream.CopyToDevice(
        piece.device, HostAt(piece.host_offset), piece.bytes));
  }
  memory_->Mark(BatchMemory::Point::kCopied);
  OPTSTATE_RETURN_IF_ERROR(kernels.UpdateWhole(
      tasks_[0].key.optimizer, device, static_cast<uint32_t>(tasks_.size()),
      rounds, &stream));
  memory_->Mark(BatchMemory::Point::kComputed);
  ListPieces(/*with_current=*/true);
  for (const Piece& piece : pieces_) {
    OPTSTATE_RETURN_IF_ERROR(stream.CopyToHost(HostAt(piece.host_offset),
                                               piece.device, piece.bytes));
  }
  return memory_->MarkEnd();
}

bool WholeBatch::WriteBack(size_t i, WorkerUndo* /*undo*/) {
  const UpdateTask& task = tasks_[i].task;
  const Place& place = places_[i];
  task.whole->WriteBack(task.parameter, place.arrays);
  if (place.kept != nullptr) {
    place.kept->step.store(task.step, std::memory_order_relaxed);
  }
  return true;
}

bool WholeBatch::UpdateByCpu(size_t i, WorkerUndo* undo) {
  if (places_[i].kept != nullptr) places_[i].kept->Drop();
  tasks_.UpdateByCpu(i, undo);
  return true;
}

}  // namespace optstate::scheduler
