#include "server/session/transfer/state_loader.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/session/transfer/range_checks.h"
#include "spdlog/spdlog.h"

namespace optstate::session {
namespace {

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
  kernels::CastToFloat(dtype, from, to, numel);
}

}  // namespace

absl::Status StateLoader::BeginLoad(uint32_t rank) {
  gate_.AwaitPauseEnd();
  OPTSTATE_RETURN_IF_ERROR(ranks_.CheckAttached(rank));
  if (job_.recovery.has_value()) return job_.StillRecovering();
  if (step_.open_step.commit(rank).committed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has committed step ", job_.record().committed_step + 1,
        ": nothing can be loaded before it is taken or aborted"));
  }
  OPTSTATE_RETURN_IF_ERROR(agreement_.AgreeToLoad(rank));
  if (load_.round.finished(rank)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has finished its load and waits for the others"));
  }
  // A rank that announces a load early announces it again when it loads.
  if (load_.round.begun(rank) && !load_.round.has_loaded(rank))
    return absl::OkStatus();
  stager_.DropStaged(rank);
  rounds_.Leave(rank, "has begun its load anew");
  if (!load_.round.active()) OPTSTATE_RETURN_IF_ERROR(rounds_.Start());
  load_.round.Begin(rank);
  return absl::OkStatus();
}

absl::Status StateLoader::CheckLoading(uint32_t rank) const {
  OPTSTATE_RETURN_IF_ERROR(ranks_.CheckAttached(rank));
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  if (load_.round.begun(rank) && !load_.round.finished(rank))
    return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(load_.round.dropped(rank));
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " has not begun a load"));
}

// Records the parameter before the first byte is written in place: see
// AdoptUnfinishedLoad.
void StateLoader::NoteTouched(uint32_t parameter) {
  if (job_.record().load_touched_from <= parameter) return;
  storage::StepRecord next = job_.record();
  next.load_touched_from = parameter;
  storage::PublishRecord(next, job_.tier->control());
}

// Without room for the load, or when a part that was left out is lost, the load
// is over for all ranks, none of which could go on without this one's part.
absl::Status StateLoader::Load(uint32_t rank, v1::StateArray array,
                               uint32_t parameter, uint64_t begin,
                               uint64_t numel, DType dtype,
                               absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(CheckLoading(rank));
  load_.round.NoteLoaded(rank);
  const ElementRange range = {array, parameter, begin, numel};
  if (array == v1::STATE_ARRAY_GRADIENT_NORM ||
      array == v1::STATE_ARRAY_PREPARED_SUM) {
    return absl::InvalidArgumentError(
        "norms and sums of gradients are no state: they cannot be loaded");
  }
  if (array == v1::STATE_ARRAY_PARAMETER) {
    return absl::InvalidArgumentError(
        "a parameter is loaded as its masters: load array 1");
  }
  absl::Status loaded = ElementAccess::IsPerParameter(array)
                            ? LoadNumbers(range, data)
                            : LoadElements(rank, range, dtype, data);
  if (absl::IsResourceExhausted(loaded) || absl::IsAborted(loaded)) {
    rounds_.Drop(loaded);
  }
  return loaded;
}

absl::Status StateLoader::LoadNumbers(const ElementRange& range,
                                      absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(CheckNoBegin(range));
  OPTSTATE_RETURN_IF_ERROR(CheckNumbers(job_, range.array, range.parameter,
                                        range.numel, data.size()));
  const auto grow = [this](uint64_t bytes) { return log_.Grow(bytes); };
  const ElementAccess elements = job_.Elements();
  constexpr uint64_t kBytes = sizeof(int64_t);
  for (uint64_t i = 0; i < range.numel; ++i) {
    const uint64_t parameter = range.parameter + i;
    std::byte number[kBytes];  // read once: the peer may be writing
    std::memcpy(number, data.data() + i * kBytes, kBytes);
    OPTSTATE_RETURN_IF_ERROR(CheckNumber(job_, range.array, parameter, number));
    const ElementRange one = {range.array, 0, parameter, 1};
    if (parameter < job_.record().load_required_from) {
      OPTSTATE_RETURN_IF_ERROR(load_.staged.StageNumber(
          elements, one, number,
          NumbersAt(job_, range.array, static_cast<uint32_t>(parameter)),
          grow));
    } else {
      NoteTouched(static_cast<uint32_t>(parameter));
      OPTSTATE_RETURN_IF_ERROR(elements.Write(one, number));
    }
  }
  return absl::OkStatus();
}

// Loads block by block, so that buffers on the stack are enough; a block lies
// in one record.
absl::Status StateLoader::LoadElements(uint32_t rank, const ElementRange& range,
                                       DType dtype,
                                       absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckParameterRange(range.parameter, 1));
  const ElementAccess elements = job_.Elements();
  OPTSTATE_RETURN_IF_ERROR(elements.Check(range));
  OPTSTATE_ASSIGN_OR_RETURN(const size_t piece, FindPiece(job_, rank, range));
  OPTSTATE_RETURN_IF_ERROR(
      CheckDataBytes(range.numel * SizeInBytes(dtype), data.size()));
  const bool in_place = range.parameter >= job_.record().load_required_from;
  if (in_place) NoteTouched(range.parameter);
  float values[ElementAccess::kBlockElements];
  const uint64_t end = range.begin + range.numel;
  for (ElementRange block = range; block.begin < end;
       block.begin += block.numel) {
    block.numel = std::min<uint64_t>(
        {end - block.begin, std::size(values),
         elements.RecordElementsFrom(block.parameter, block.begin)});
    CastAnyToFloat(
        dtype, data.data() + (block.begin - range.begin) * SizeInBytes(dtype),
        values, block.numel);
    OPTSTATE_RETURN_IF_ERROR(in_place ? LoadInPlace(block, values)
                                      : StageBlock(block, values));
  }
  if (range.array == v1::STATE_ARRAY_MASTER) {
    load_.round.NoteMaster(rank, piece, range.begin, range.begin + range.numel);
  }
  return absl::OkStatus();
}

absl::Status StateLoader::LoadInPlace(const ElementRange& block,
                                      const float* values) {
  const ElementAccess elements = job_.Elements();
  alignas(8) std::byte payload[ElementAccess::kBlockBytesMax];
  elements.MakePayload(block, values, payload);
  return job_.AccessRecords([&] { return elements.Write(block, payload); });
}

absl::Status StateLoader::StageBlock(const ElementRange& block,
                                     const float* values) {
  const ElementAccess elements = job_.Elements();
  alignas(8) std::byte payload[ElementAccess::kBlockBytesMax];
  bool is_present = false;
  OPTSTATE_RETURN_IF_ERROR(job_.AccessRecords([&]() -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(
        is_present, load_.staged.Compare(elements, block, values, payload));
    return absl::OkStatus();
  }));
  return load_.staged.Stage(
      elements, block, payload, is_present,
      [this](uint64_t bytes) { return log_.Grow(bytes); });
}

// Checks where the rank has the job begin, if it does.
absl::Status StateLoader::CheckBegin(const LoadEnd& end) const {
  if (!end.begin_at.has_value()) return absl::OkStatus();
  const auto& [step, loads] = *end.begin_at;
  if (step >= kBeginAtStepEnd || loads == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a job cannot begin at step ", step, " after ", loads,
        " loads: the step must be below 2^63, and there must be a load"));
  }
  const uint64_t committed = job_.record().committed_step;
  if (committed == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", job_.options.name, "\" has committed step ", committed,
      ", and only a job that has taken no step can begin at another one (",
      step, "): load into a new job"));
}

// Checks a load that all ranks have finished. What is staged is put into place
// in more than one store, and the seal has no place for a step.
absl::Status StateLoader::CheckFinished() const {
  OPTSTATE_RETURN_IF_ERROR(load_.round.CheckAlike());
  if (!load_.round.begin_at().has_value() || load_.staged.empty()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", job_.options.name, "\" cannot begin at step ",
      load_.round.begin_at()->step,
      " with a load that changes parameters which have a state. The job is "
      "unchanged: finish that load without the step, and have it begin there "
      "with another load, of nothing"));
}

void StateLoader::FinishLoad(uint32_t rank, uint64_t request_id,
                             const LoadEnd& end) {
  if (!ranks_.CheckAttached(rank).ok()) return;  // no rank to answer
  absl::Status status = CheckLoading(rank);
  if (status.ok()) status = CheckBegin(end);
  if (status.ok()) {
    status = load_.round.CheckComplete(rank, job_.record().load_required_from);
  }
  if (!status.ok()) {
    ranks_.Answer(rank, request_id, status, StepOutcome{});
    return;
  }
  load_.round.Finish(rank, request_id, end);
  if (!load_.round.all_finished()) return;
  const absl::Status fits = CheckFinished();
  if (!fits.ok()) {
    observe::LogRepeated(spdlog::level::warn, "load refused",
                         absl::StrCat("job ", job_.options.name), "{}: job={}",
                         fits.ToString(), job_.options.name);
    return rounds_.Drop(fits);
  }
  const std::optional<BeginAt> begin_at = load_.round.begin_at();
  const absl::Status taken = applier_.CommitLoad(begin_at);
  if (taken.ok() && begin_at.has_value()) {
    ranks_.NoteCommittedStep(begin_at->step);
  }
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    ranks_.Answer(r, load_.round.request_id(r), taken, job_.LastOutcome());
  }
  load_.round.Clear();
}

}  // namespace optstate::session
