// State from a checkpoint into the job, and out of it.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/cast.h"
#include "kernels/state_format.h"
#include "proto/types/array_format.h"
#include "proto/types/status_macros.h"
#include "server/session/job_impl.h"

namespace optstate {
namespace {

// Larger counts come from no training and would overflow in the next step.
constexpr int64_t kStepCountMax = int64_t{1} << 53;

absl::Status CheckBytes(uint64_t expected, uint64_t found) {
  if (expected == found) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the elements take ", expected, " bytes, ", found, " were given"));
}

bool Aligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// memcpy, whose pointers may be null when there is nothing to copy.
void CopyTo(absl::Span<std::byte> out, const void* from) {
  if (!out.empty()) std::memcpy(out.data(), from, out.size());
}

// CastToFloat for elements at any address, as a message may hold them.
void CastAnyToFloat(DType dtype, const std::byte* from, float* to,
                    uint64_t numel) {
  if (Aligned(from, SizeInBytes(dtype))) {
    CastToFloat(dtype, from, to, numel);
    return;
  }
  alignas(64) std::byte aligned[4096];
  const uint64_t elements_max = sizeof(aligned) / SizeInBytes(dtype);
  while (numel > 0) {
    const uint64_t elements = std::min(numel, elements_max);
    std::memcpy(aligned, from, elements * SizeInBytes(dtype));
    CastToFloat(dtype, aligned, to, elements);
    from += elements * SizeInBytes(dtype);
    to += elements;
    numel -= elements;
  }
}

}  // namespace

absl::Status JobImpl::BeginLoad(uint32_t rank) {
  absl::MutexLock lock(&mu_);
  SitOutRest();
  OPTSTATE_RETURN_IF_ERROR(CheckAttached(rank));
  if (recovery_.has_value()) return BeingFinished();
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (!open_step_.commit(other).committed) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", other, " has committed step ", record().committed_step + 1,
        ": nothing can be loaded before it is taken or aborted"));
  }
  if (load_.finished(rank)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has finished its load and waits for the others"));
  }
  DropStaged(rank);
  if (!load_.active()) {
    StartLoadRound();
  } else if (load_.begun(rank)) {
    LeaveLoadRound(rank);  // starts anew
  }
  load_.Begin(rank);
  return absl::OkStatus();
}

// What a former load left half written, and all that a failed job has, is
// cleared, so that arrays which this load leaves out are those of a new job and
// not a mixture.
void JobImpl::StartLoadRound() {
  StepRecord next = record();
  if (!failure_.ok()) {
    next.load_required_from = 0;
    next.load_touched_from = 0;
  }
  if (next.load_touched_from == kNoParameter) return;
  const uint32_t first = next.load_touched_from;
  next.load_required_from = std::min(next.load_required_from, first);
  PublishRecord(next, tier_->control());
  scheduler_->ForgetStep();
  // From here on the job is LOADING, not FAILED, also after a restart.
  tier_->control()->step_in_progress.store(0, std::memory_order_release);
  tier_->control()->step_given_up.store(0, std::memory_order_release);
  failure_ = absl::OkStatus();
  scheduler_->ClearState(first);
  next.load_touched_from = kNoParameter;
  PublishRecord(next, tier_->control());
}

// A rank that leaves before all have finished may have loaded a part.
void JobImpl::LeaveLoadRound(uint32_t rank) {
  if (!load_.begun(rank)) return;
  load_.DropRank(rank);
  AdoptUnfinishedLoad();
}

absl::Status JobImpl::CheckLoading(uint32_t rank) const {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached(rank));
  OPTSTATE_RETURN_IF_ERROR(failure_);
  if (load_.begun(rank) && !load_.finished(rank)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " has not begun a load"));
}

// Before the first byte is written: see AdoptUnfinishedLoad.
void JobImpl::NoteLoadTouches(uint32_t parameter) {
  if (record().load_touched_from <= parameter) return;
  StepRecord next = record();
  next.load_touched_from = parameter;
  PublishRecord(next, tier_->control());
}

uint64_t JobImpl::ElementsOf(v1::StateArray array,
                             const ParameterSpec& spec) const {
  const int index = static_cast<int>(array) - v1::STATE_ARRAY_STATE_0;
  const OptimizerInfo& info = layout_of_job().optimizer_info();
  if (index < 0 || static_cast<size_t>(index) >= info.state_arrays.size()) {
    return static_cast<uint64_t>(spec.numel);
  }
  return StateElements(info, index, spec.shape);
}

absl::Status JobImpl::CheckElementRange(const LoadRange& range) const {
  OPTSTATE_RETURN_IF_ERROR(CheckParameterRange(range.parameter, 1));
  const ParameterSpec& spec = layout_of_job().parameters()[range.parameter];
  const uint64_t numel = ElementsOf(range.array, spec);
  if (range.begin <= numel && range.numel <= numel - range.begin) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      range.numel, " elements from ", range.begin, " of parameter ",
      range.parameter, " \"", spec.name, "\", which has ", numel));
}

absl::Status JobImpl::CheckPerParameterRange(const LoadRange& range,
                                             uint64_t bytes) const {
  if (range.begin != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is one number per parameter: begin is ",
                     range.begin, ", it must be 0"));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckParameterRange(range.parameter, range.numel));
  return CheckBytes(range.numel * sizeof(int64_t), bytes);
}

absl::StatusOr<size_t> JobImpl::PieceOf(uint32_t rank,
                                        const LoadRange& range) const {
  const RankPartition& partition = shape_->partitions[rank];
  const size_t i = partition.LowerBound(range.parameter);
  if (i < partition.pieces.size()) {
    const Piece& piece = partition.pieces[i];
    const ParameterSpec& spec = layout_of_job().parameters()[range.parameter];
    // What has no place for each element belongs to who has the first one.
    if (piece.parameter == range.parameter && piece.begin == 0 &&
        ElementsOf(range.array, spec) != static_cast<uint64_t>(spec.numel)) {
      return i;
    }
    if (piece.parameter == range.parameter && range.begin >= piece.begin &&
        range.begin + range.numel <= piece.begin + piece.numel) {
      return i;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("elements from ", range.begin, " to ",
                   range.begin + range.numel, " of parameter ", range.parameter,
                   " \"", layout_of_job().parameters()[range.parameter].name,
                   "\" do not belong to rank ", rank));
}

absl::StatusOr<JobImpl::ArrayRef> JobImpl::ArrayOf(
    const LoadRange& range) const {
  const Layout& layout = layout_of_job();
  const StateArrays arrays = tier_->arrays();
  const uint64_t flat = layout.flat_offset(range.parameter) + range.begin;
  const int index = static_cast<int>(range.array) - v1::STATE_ARRAY_STATE_0;
  const auto known = layout.optimizer_info().state_arrays;
  if (index < 0 || static_cast<size_t>(index) >= known.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown state array ", static_cast<int>(range.array)));
  }
  const ParameterSpec& spec = layout.parameters()[range.parameter];
  if (!layout.has_state_array(index, spec.group)) {
    const absl::string_view name = known[static_cast<size_t>(index)].name;
    return absl::InvalidArgumentError(absl::StrCat(
        "group ", spec.group, " of parameter \"", spec.name, "\" has no ", name,
        ": it is without the option that brings it"));
  }
  const StateFormat format = ArrayFormat(layout, index);
  ArrayRef ref = {
      .data = arrays.state[index] + flat * SizeInBytes(format),
      .format = format,
      .is_never_negative = IsNeverNegative(layout.optimizer(), index)};
  if (format != StateFormat::kDynamic8) return ref;
  ref.scale = arrays.scale[index] + flat / kQuantizedBlockElements;
  const uint64_t end = range.begin + range.numel;
  if (range.begin % kQuantizedBlockElements == 0 &&
      (end % kQuantizedBlockElements == 0 ||
       end == static_cast<uint64_t>(spec.numel))) {
    return ref;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "elements from ", range.begin, " to ", end, " of parameter \"", spec.name,
      "\" cut a block of ", kQuantizedBlockElements,
      ", which has one scale: take whole blocks"));
}

absl::Status JobImpl::Load(uint32_t rank, v1::StateArray array,
                           uint32_t parameter, uint64_t begin, uint64_t numel,
                           DType dtype, absl::Span<const std::byte> data) {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckLoading(rank));
  const LoadRange range = {array, parameter, begin, numel};
  if (array == v1::STATE_ARRAY_STEP_COUNT) return LoadStepCounts(range, data);
  if (array == v1::STATE_ARRAY_SCALAR) return LoadScalars(range, data);
  if (array == v1::STATE_ARRAY_GRADIENT_NORM) {
    return absl::InvalidArgumentError(
        "gradient norms are no state: they cannot be loaded");
  }
  return LoadElements(rank, range, dtype, data);
}

absl::Status JobImpl::LoadStepCounts(const LoadRange& range,
                                     absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(CheckPerParameterRange(range, data.size()));
  for (uint64_t i = 0; i < range.numel; ++i) {
    int64_t count;  // read once: the peer may be writing
    std::memcpy(&count, data.data() + i * sizeof(count), sizeof(count));
    if (count < 0 || count > kStepCountMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          "step count ", count, " of parameter ", range.parameter + i));
    }
    NoteLoadTouches(range.parameter + static_cast<uint32_t>(i));
    tier_->arrays().step_counts[range.parameter + i] = count;
  }
  return absl::OkStatus();
}

absl::Status JobImpl::LoadScalars(const LoadRange& range,
                                  absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(CheckScalars());
  OPTSTATE_RETURN_IF_ERROR(CheckPerParameterRange(range, data.size()));
  for (uint64_t i = 0; i < range.numel; ++i) {
    double scalar;  // read once: the peer may be writing
    std::memcpy(&scalar, data.data() + i * sizeof(scalar), sizeof(scalar));
    if (!std::isfinite(scalar)) {
      return absl::InvalidArgumentError(absl::StrCat(
          layout_of_job().optimizer_info().scalar, " ", scalar,
          " of parameter ", range.parameter + i, " is not finite"));
    }
    NoteLoadTouches(range.parameter + static_cast<uint32_t>(i));
    tier_->arrays().scalars[range.parameter + i] = scalar;
  }
  return absl::OkStatus();
}

absl::Status JobImpl::CheckScalars() const {
  const OptimizerInfo& info = layout_of_job().optimizer_info();
  if (!info.scalar.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(info.name, " keeps no number per parameter"));
}

// Block by block, so that a buffer on the stack is enough.
void JobImpl::WriteState(DType dtype, absl::Span<const std::byte> data,
                         const ArrayRef& to, uint64_t numel) {
  float block[kQuantizedBlockElements];
  for (uint64_t i = 0; i < numel; i += kQuantizedBlockElements) {
    const uint64_t count = std::min<uint64_t>(numel - i, std::size(block));
    CastAnyToFloat(dtype, data.data() + i * SizeInBytes(dtype), block, count);
    StateFromFloat(
        to.format, to.is_never_negative, block,
        static_cast<std::byte*>(to.data) + i * SizeInBytes(to.format),
        to.scale == nullptr ? nullptr : to.scale + i / kQuantizedBlockElements,
        count);
  }
}

void JobImpl::WriteMaster(DType dtype, absl::Span<const std::byte> data,
                          const LoadRange& to) {
  ControlFile& control = *tier_->control();
  for (uint64_t i = 0; i < to.numel; i += kLoadBlockElements) {
    control.loading_begin = to.begin + i;
    control.loading_numel =
        std::min<uint64_t>(to.numel - i, kLoadBlockElements);
    CastAnyToFloat(dtype, data.data() + i * SizeInBytes(dtype),
                   control.loading_masters, control.loading_numel);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    control.parameter_loading.store(to.parameter + uint64_t{1},
                                    std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    scheduler_->WriteMaster(to.parameter, control.loading_begin,
                            control.loading_numel, control.loading_masters);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    control.parameter_loading.store(0, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
}

absl::Status JobImpl::AdoptLoadedMasters() {
  ControlFile& control = *tier_->control();
  const uint64_t one_more =
      control.parameter_loading.load(std::memory_order_relaxed);
  if (one_more == 0) return absl::OkStatus();
  const auto parameters = layout_of_job().parameters();
  const auto numel = static_cast<uint64_t>(parameters[one_more - 1].numel);
  if (control.loading_numel > kLoadBlockElements ||
      control.loading_begin > numel ||
      control.loading_numel > numel - control.loading_begin) {
    return absl::DataLossError(
        absl::StrCat("control: a load was overwriting ", control.loading_numel,
                     " elements from ", control.loading_begin, " of parameter ",
                     one_more - 1, ", which has ", numel));
  }
  scheduler_->WriteMaster(static_cast<uint32_t>(one_more - 1),
                          control.loading_begin, control.loading_numel,
                          control.loading_masters);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  control.parameter_loading.store(0, std::memory_order_relaxed);
  return absl::OkStatus();
}

void JobImpl::ReadMaster(const LoadRange& from,
                         absl::Span<std::byte> out) const {
  float block[kQuantizedBlockElements];
  for (uint64_t i = 0; i < from.numel; i += std::size(block)) {
    const uint64_t count = std::min<uint64_t>(from.numel - i, std::size(block));
    scheduler_->ReadMaster(from.parameter, from.begin + i, count, block);
    std::memcpy(out.data() + i * sizeof(float), block, count * sizeof(float));
  }
}

void JobImpl::ReadState(const ArrayRef& from, uint64_t numel,
                        absl::Span<std::byte> out) {
  float block[kQuantizedBlockElements];
  for (uint64_t i = 0; i < numel; i += kQuantizedBlockElements) {
    const uint64_t count = std::min<uint64_t>(numel - i, std::size(block));
    StateToFloat(
        from.format, from.is_never_negative,
        static_cast<const std::byte*>(from.data) + i * SizeInBytes(from.format),
        from.scale == nullptr ? nullptr
                              : from.scale + i / kQuantizedBlockElements,
        block, count);
    std::memcpy(out.data() + i * sizeof(float), block, count * sizeof(float));
  }
}

absl::Status JobImpl::LoadElements(uint32_t rank, const LoadRange& range,
                                   DType dtype,
                                   absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(CheckElementRange(range));
  OPTSTATE_ASSIGN_OR_RETURN(const size_t piece, PieceOf(rank, range));
  OPTSTATE_RETURN_IF_ERROR(
      CheckBytes(range.numel * SizeInBytes(dtype), data.size()));
  if (range.array != v1::STATE_ARRAY_MASTER) {
    OPTSTATE_ASSIGN_OR_RETURN(const ArrayRef array, ArrayOf(range));
    NoteLoadTouches(range.parameter);
    WriteState(dtype, data, array, range.numel);
    return absl::OkStatus();
  }
  // Masters alone, into a job that has all of its own: the trainer overwrote
  // parameters in place. A load that breaks off leaves each as it was or as it
  // was to be, beside moments that nobody touched; there is nothing to clear.
  if (range.parameter >= record().load_required_from) {
    NoteLoadTouches(range.parameter);
  }
  WriteMaster(dtype, data, range);
  load_.NoteMaster(rank, piece, range.begin, range.begin + range.numel);
  return absl::OkStatus();
}

void JobImpl::FinishLoad(uint32_t rank, uint64_t request_id) {
  absl::MutexLock lock(&mu_);
  if (!CheckAttached(rank).ok()) return;  // nobody to answer
  absl::Status status = CheckLoading(rank);
  if (status.ok()) {
    status = load_.CheckComplete(rank, record().load_required_from);
  }
  if (!status.ok()) {
    ranks_[rank].spec.listener->OnStepDone(request_id, status, StepOutcome{});
    return;
  }
  load_.Finish(rank, request_id);
  if (!load_.all_finished()) return;
  StepRecord next = record();
  next.load_required_from = parameter_count();
  next.load_touched_from = kNoParameter;
  ++next.loads_finished;
  PublishRecord(next, tier_->control());
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    ranks_[r].spec.listener->OnStepDone(load_.request_id(r), absl::OkStatus(),
                                        LastOutcome());
  }
  load_.Clear();
}

absl::StatusOr<uint64_t> JobImpl::Fetch(v1::StateArray array,
                                        uint32_t parameter, uint64_t begin,
                                        uint64_t numel,
                                        absl::Span<std::byte> out) {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(failure_);
  if (recovery_.has_value()) return BeingFinished();
  TakeBackSpeculation();
  if (phase() != v1::JOB_PHASE_READY) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", options_.name, "\" is loading: its state is of no step"));
  }
  const LoadRange range = {array, parameter, begin, numel};
  if (array == v1::STATE_ARRAY_STEP_COUNT) {
    OPTSTATE_RETURN_IF_ERROR(CheckPerParameterRange(range, out.size()));
    CopyTo(out, tier_->arrays().step_counts + parameter);
    return record().committed_step;
  }
  if (array == v1::STATE_ARRAY_SCALAR) {
    OPTSTATE_RETURN_IF_ERROR(CheckScalars());
    OPTSTATE_RETURN_IF_ERROR(CheckPerParameterRange(range, out.size()));
    CopyTo(out, tier_->arrays().scalars + parameter);
    return record().committed_step;
  }
  if (array == v1::STATE_ARRAY_GRADIENT_NORM) {
    OPTSTATE_RETURN_IF_ERROR(CheckGradientNorms());
    OPTSTATE_RETURN_IF_ERROR(CheckPerParameterRange(range, out.size()));
    CopyTo(out, gradient_norms_.data() + parameter);
    return record().committed_step;
  }
  OPTSTATE_RETURN_IF_ERROR(CheckElementRange(range));
  OPTSTATE_RETURN_IF_ERROR(CheckBytes(numel * sizeof(float), out.size()));
  if (array == v1::STATE_ARRAY_MASTER) {
    ReadMaster(range, out);
    return record().committed_step;
  }
  OPTSTATE_ASSIGN_OR_RETURN(const ArrayRef from, ArrayOf(range));
  ReadState(from, numel, out);
  return record().committed_step;
}

absl::Status JobImpl::CheckGradientNorms() const {
  if (gradient_norms_step_ != 0 &&
      gradient_norms_step_ == record().committed_step) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", options_.name, "\": gradient norms of step ",
      record().committed_step,
      " are not known: they are of steps that this engine has taken, and none "
      "outlives it; take a step first"));
}

absl::Status JobImpl::ReadParameters(uint64_t offset_bytes,
                                     absl::Span<std::byte> out) {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(failure_);
  if (recovery_.has_value()) return BeingFinished();
  TakeBackSpeculation();
  const uint64_t area = layout_of_job().parameter_area_bytes();
  if (offset_bytes > area || out.size() > area - offset_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(out.size(), " bytes from ", offset_bytes,
                     " of a parameter area of ", area));
  }
  CopyTo(out, tier_->arrays().parameters + offset_bytes);
  return absl::OkStatus();
}

}  // namespace optstate
