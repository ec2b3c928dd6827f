// Loads state, such as a checkpoint's, into a job: which rank loads what, and
// when all ranks have finished.
//
// Parameters that have a valid state are loaded beside it (StagedLoad) and get
// all new values at once, see job_load_apply.cc. Parameters without one, in a
// new job or an extended layout, are loaded in place.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/cast.h"
#include "proto/types/status_macros.h"
#include "server/session/job_impl.h"
#include "spdlog/spdlog.h"

namespace optstate {
namespace {

// Larger counts come from no training and would overflow in the next step.
constexpr int64_t kStepCountMax = int64_t{1} << 53;

bool Aligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Applies CastToFloat to a block at any address, as a message may hold it.
void CastAnyToFloat(DType dtype, const std::byte* from, float* to,
                    uint64_t numel) {
  alignas(64) std::byte aligned[ElementAccess::kBlockBytesMax];
  if (!Aligned(from, SizeInBytes(dtype))) {
    std::memcpy(aligned, from, numel * SizeInBytes(dtype));
    from = aligned;
  }
  CastToFloat(dtype, from, to, numel);
}

}  // namespace

absl::Status JobImpl::BeginLoad(uint32_t rank) {
  absl::MutexLock lock(&mu_);
  SitOutRest();
  OPTSTATE_RETURN_IF_ERROR(CheckAttached(rank));
  if (recovery_.has_value()) return BeingFinished();
  if (open_step_.commit(rank).committed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has committed step ", record().committed_step + 1,
        ": nothing can be loaded before it is taken or aborted"));
  }
  OPTSTATE_RETURN_IF_ERROR(AgreeToLoad(rank));
  if (load_.finished(rank)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has finished its load and waits for the others"));
  }
  // A rank that announces a load early announces it again when it loads.
  if (load_.begun(rank) && !load_.has_loaded(rank)) return absl::OkStatus();
  DropStaged(rank);
  LeaveLoadRound(rank, "has begun its load anew");
  if (!load_.active()) OPTSTATE_RETURN_IF_ERROR(StartLoadRound());
  load_.Begin(rank);
  return absl::OkStatus();
}

// Clears what a former load left half written in place, and all state of a
// failed job, so that arrays which this load leaves out are those of a new job
// and not a mixture.
absl::Status JobImpl::StartLoadRound() {
  DropStagedLoad();
  StepRecord next = record();
  if (!failure_.ok()) {
    next.load_required_from = 0;
    next.load_touched_from = 0;
  }
  if (next.load_touched_from == kNoParameter) return absl::OkStatus();
  const uint32_t first = next.load_touched_from;
  next.load_required_from = std::min(next.load_required_from, first);
  PublishRecord(next, tier_->control());
  scheduler_->ForgetStep();
  // From here on the job is LOADING, not FAILED, also after a restart.
  tier_->control()->step_in_progress.store(0, std::memory_order_release);
  tier_->control()->step_given_up.store(0, std::memory_order_release);
  failure_ = absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(scheduler_->ClearState(first));
  next.load_touched_from = kNoParameter;
  PublishRecord(next, tier_->control());
  return absl::OkStatus();
}

bool JobImpl::HasWholeState() const {
  return record().load_required_from == parameter_count();
}

// Removes the rank from the round. The log holds values of all ranks, so none
// of it can be used when one rank does not go on: the round is over for the
// others too. Without a log they go on: their values loaded in place stay, and
// the rank's own part is still required.
void JobImpl::LeaveLoadRound(uint32_t rank, absl::string_view why) {
  const bool had_begun = load_.begun(rank);
  load_.DropRank(rank);
  if (!had_begun) return;
  if (!HasWholeState() && staged_load_.empty()) return AdoptUnfinishedLoad();
  DropLoad(absl::AbortedError(absl::StrCat(
      "rank ", rank, " ", why,
      " before all ranks had finished the load: the job is as it was before, "
      "load again")));
}

// Ends the round for the ranks that are in it. The job is unchanged, except for
// parameters that have no valid state.
void JobImpl::DropLoad(const absl::Status& why) {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!load_.finished(rank)) continue;
    ranks_[rank].spec.listener->OnStepDone(load_.request_id(rank), why,
                                           StepOutcome{});
  }
  load_.Drop(why);
  DropStagedLoad();
  AdoptUnfinishedLoad();
}

absl::Status JobImpl::CheckLoading(uint32_t rank) const {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached(rank));
  OPTSTATE_RETURN_IF_ERROR(failure_);
  if (load_.begun(rank) && !load_.finished(rank)) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(load_.dropped(rank));
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " has not begun a load"));
}

// Records the parameter before the first byte is written in place: see
// AdoptUnfinishedLoad.
void JobImpl::NoteLoadTouches(uint32_t parameter) {
  if (record().load_touched_from <= parameter) return;
  StepRecord next = record();
  next.load_touched_from = parameter;
  PublishRecord(next, tier_->control());
}

absl::Status JobImpl::CheckDataBytes(uint64_t expected, uint64_t found) {
  if (expected == found) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the elements take ", expected, " bytes, ", found, " were given"));
}

absl::Status JobImpl::CheckNumbers(v1::StateArray array, uint64_t first,
                                   uint64_t count, uint64_t bytes) const {
  const OptimizerInfo& info = layout_of_job().optimizer_info();
  if (array == v1::STATE_ARRAY_SCALAR && info.scalar.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(info.name, " keeps no number per parameter"));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckParameterRange(first, count));
  return CheckDataBytes(count * sizeof(int64_t), bytes);
}

absl::Status JobImpl::CheckNoBegin(const ElementRange& range) {
  if (range.begin == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("there is one number per parameter: begin is ", range.begin,
                   ", it must be 0"));
}

const std::byte* JobImpl::NumbersAt(v1::StateArray array,
                                    uint32_t parameter) const {
  return array == v1::STATE_ARRAY_STEP_COUNT
             ? reinterpret_cast<const std::byte*>(
                   &store_->step_counts()[parameter])
             : reinterpret_cast<const std::byte*>(
                   &store_->scalars()[parameter]);
}

absl::StatusOr<size_t> JobImpl::PieceOf(uint32_t rank,
                                        const ElementRange& range) const {
  const RankPartition& partition = shape_->partitions[rank];
  const size_t i = partition.LowerBound(range.parameter);
  if (i < partition.pieces.size()) {
    const Piece& piece = partition.pieces[i];
    const ParameterSpec& spec = layout_of_job().parameters()[range.parameter];
    // An array without an entry per element belongs to the owner of the first.
    if (piece.parameter == range.parameter && piece.begin == 0 &&
        Elements().ElementsOf(range.array, spec) !=
            static_cast<uint64_t>(spec.numel)) {
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

// Without room for the load, the load is over for all ranks, none of which
// could go on without this one's part.
absl::Status JobImpl::Load(uint32_t rank, v1::StateArray array,
                           uint32_t parameter, uint64_t begin, uint64_t numel,
                           DType dtype, absl::Span<const std::byte> data) {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckLoading(rank));
  load_.NoteLoaded(rank);
  const ElementRange range = {array, parameter, begin, numel};
  if (array == v1::STATE_ARRAY_GRADIENT_NORM) {
    return absl::InvalidArgumentError(
        "gradient norms are no state: they cannot be loaded");
  }
  absl::Status loaded = ElementAccess::IsPerParameter(array)
                            ? LoadNumbers(range, data)
                            : LoadElements(rank, range, dtype, data);
  if (absl::IsResourceExhausted(loaded)) DropLoad(loaded);
  return loaded;
}

absl::Status JobImpl::CheckNumber(v1::StateArray array, uint64_t parameter,
                                  const std::byte* bytes) const {
  if (array == v1::STATE_ARRAY_STEP_COUNT) {
    int64_t count;
    std::memcpy(&count, bytes, sizeof(count));
    if (count >= 0 && count <= kStepCountMax) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("step count ", count, " of parameter ", parameter));
  }
  double scalar;
  std::memcpy(&scalar, bytes, sizeof(scalar));
  if (std::isfinite(scalar)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(layout_of_job().optimizer_info().scalar, " ", scalar,
                   " of parameter ", parameter, " is not finite"));
}

absl::Status JobImpl::LoadNumbers(const ElementRange& range,
                                  absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(CheckNoBegin(range));
  OPTSTATE_RETURN_IF_ERROR(
      CheckNumbers(range.array, range.parameter, range.numel, data.size()));
  const auto grow = [this](uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return GrowLoadLog(bytes);
  };
  const ElementAccess elements = Elements();
  constexpr uint64_t kBytes = sizeof(int64_t);
  for (uint64_t i = 0; i < range.numel; ++i) {
    const uint64_t parameter = range.parameter + i;
    std::byte number[kBytes];  // read once: the peer may be writing
    std::memcpy(number, data.data() + i * kBytes, kBytes);
    OPTSTATE_RETURN_IF_ERROR(CheckNumber(range.array, parameter, number));
    const ElementRange one = {range.array, 0, parameter, 1};
    if (parameter < record().load_required_from) {
      OPTSTATE_RETURN_IF_ERROR(staged_load_.StageNumber(
          elements, one, number,
          NumbersAt(range.array, static_cast<uint32_t>(parameter)), grow));
    } else {
      NoteLoadTouches(static_cast<uint32_t>(parameter));
      OPTSTATE_RETURN_IF_ERROR(elements.Write(one, number));
    }
  }
  return absl::OkStatus();
}

// Loads block by block, so that buffers on the stack are enough.
absl::Status JobImpl::LoadElements(uint32_t rank, const ElementRange& range,
                                   DType dtype,
                                   absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(CheckParameterRange(range.parameter, 1));
  const ElementAccess elements = Elements();
  OPTSTATE_RETURN_IF_ERROR(elements.Check(range));
  OPTSTATE_ASSIGN_OR_RETURN(const size_t piece, PieceOf(rank, range));
  OPTSTATE_RETURN_IF_ERROR(
      CheckDataBytes(range.numel * SizeInBytes(dtype), data.size()));
  const auto grow = [this](uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return GrowLoadLog(bytes);
  };
  const bool in_place = range.parameter >= record().load_required_from;
  if (in_place) NoteLoadTouches(range.parameter);
  float values[ElementAccess::kBlockElements];
  alignas(8) std::byte payload[ElementAccess::kBlockBytesMax];
  for (uint64_t i = 0; i < range.numel; i += std::size(values)) {
    ElementRange block = range;
    block.begin += i;
    block.numel = std::min<uint64_t>(range.numel - i, std::size(values));
    CastAnyToFloat(dtype, data.data() + i * SizeInBytes(dtype), values,
                   block.numel);
    if (in_place) {
      elements.MakePayload(block, values, payload);
      OPTSTATE_RETURN_IF_ERROR(elements.Write(block, payload));
      continue;
    }
    OPTSTATE_RETURN_IF_ERROR(staged_load_.Stage(elements, block, values, grow));
  }
  if (range.array == v1::STATE_ARRAY_MASTER) {
    load_.NoteMaster(rank, piece, range.begin, range.begin + range.numel);
  }
  return absl::OkStatus();
}

void JobImpl::FinishLoad(uint32_t rank, uint64_t request_id,
                         uint64_t content_digest) {
  absl::MutexLock lock(&mu_);
  if (!CheckAttached(rank).ok()) return;  // no rank to answer
  absl::Status status = CheckLoading(rank);
  if (status.ok()) {
    status = load_.CheckComplete(rank, record().load_required_from);
  }
  if (!status.ok()) {
    ranks_[rank].spec.listener->OnStepDone(request_id, status, StepOutcome{});
    return;
  }
  load_.Finish(rank, request_id, content_digest);
  if (!load_.all_finished()) return;
  const absl::Status alike = load_.CheckAlike();
  if (!alike.ok()) {
    spdlog::warn("{}: job={}", alike.ToString(), options_.name);
    return DropLoad(alike);
  }
  const absl::Status taken = TakeLoad();
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    ranks_[r].spec.listener->OnStepDone(load_.request_id(r), taken,
                                        LastOutcome());
  }
  load_.Clear();
}

}  // namespace optstate
