#include "server/session/transfer/state_reader.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/transfer/range_checks.h"

namespace optstate::session {
namespace {

// Calls memcpy, but permits null pointers when there is nothing to copy.
void CopyTo(absl::Span<std::byte> out, const void* from) {
  if (!out.empty()) std::memcpy(out.data(), from, out.size());
}

}  // namespace

absl::StatusOr<uint64_t> StateReader::Fetch(v1::StateArray array,
                                            uint32_t parameter, uint64_t begin,
                                            uint64_t numel,
                                            absl::Span<std::byte> out) {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  const ElementRange range = {array, parameter, begin, numel};
  if (array == v1::STATE_ARRAY_PREPARED_SUM) {
    return FetchPreparedSums(range, out);
  }
  if (job_.recovery.has_value()) return job_.StillRecovering();
  OPTSTATE_RETURN_IF_ERROR(speculator_.HoldOpenStep());
  if (job_.phase() != v1::JOB_PHASE_READY) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", job_.options.name, "\" is loading: its state is of no step"));
  }
  if (ElementAccess::IsPerParameter(array)) {
    OPTSTATE_RETURN_IF_ERROR(CheckNoBegin(range));
    OPTSTATE_RETURN_IF_ERROR(
        CheckNumbers(job_, array, parameter, numel, out.size()));
    CopyTo(out, NumbersAt(job_, array, parameter));
    return job_.record().committed_step;
  }
  if (array == v1::STATE_ARRAY_GRADIENT_NORM) {
    OPTSTATE_RETURN_IF_ERROR(decider_.CheckGradientNorms());
    OPTSTATE_RETURN_IF_ERROR(CheckNoBegin(range));
    OPTSTATE_RETURN_IF_ERROR(
        CheckNumbers(job_, array, parameter, numel, out.size()));
    CopyTo(out, decider_.gradient_norms().data() + parameter);
    return job_.record().committed_step;
  }
  OPTSTATE_RETURN_IF_ERROR(job_.CheckParameterRange(parameter, 1));
  OPTSTATE_RETURN_IF_ERROR(job_.Elements().Check(range));
  if (array == v1::STATE_ARRAY_PARAMETER) {
    OPTSTATE_RETURN_IF_ERROR(CheckDataBytes(
        numel * SizeInBytes(job_.layout().parameters()[parameter].dtype),
        out.size()));
  } else {
    OPTSTATE_RETURN_IF_ERROR(CheckDataBytes(numel * sizeof(float), out.size()));
  }
  OPTSTATE_RETURN_IF_ERROR(
      job_.AccessRecords([&] { return ReadElements(range, out); }));
  return job_.record().committed_step;
}

// The sums are in memory until the next step's first push, which no step that
// another engine prepared has.
absl::StatusOr<uint64_t> StateReader::FetchPreparedSums(
    const ElementRange& range, absl::Span<std::byte> out) const {
  if (!job_.recovery.has_value() || !job_.recovery->awaits_verdict ||
      !job_.recovery->is_ours) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", job_.options.name,
        "\" has no sums of a prepared step: this engine has prepared none "
        "whose verdict is awaited"));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckNoBegin(range));
  OPTSTATE_RETURN_IF_ERROR(CheckNumbers(job_, range.array, range.parameter,
                                        range.numel, out.size()));
  for (uint64_t i = 0; i < range.numel; ++i) {
    const auto p = static_cast<uint32_t>(range.parameter + i);
    const double sum =
        job_.recovery->updated[p] == 0 ? -1 : job_.scheduler->SumOfSquaresOf(p);
    std::memcpy(out.data() + i * sizeof(sum), &sum, sizeof(sum));
  }
  return job_.recovery->record.committed_step;
}

absl::Status StateReader::ReadElements(const ElementRange& range,
                                       absl::Span<std::byte> out) const {
  if (range.array == v1::STATE_ARRAY_PARAMETER) {
    return job_.store->ReadParameter(range.parameter, range.begin, range.numel,
                                     out.data());
  }
  const ElementAccess elements = job_.Elements();
  float block[ElementAccess::kBlockElements];
  for (uint64_t i = 0; i < range.numel; i += std::size(block)) {
    const uint64_t count =
        std::min<uint64_t>(range.numel - i, std::size(block));
    OPTSTATE_RETURN_IF_ERROR(elements.ReadFloats(
        {range.array, range.parameter, range.begin + i, count}, block));
    std::memcpy(out.data() + i * sizeof(float), block, count * sizeof(float));
  }
  return absl::OkStatus();
}

absl::Status StateReader::Hint(ParameterHint hint, uint32_t first,
                               uint32_t count) {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  OPTSTATE_RETURN_IF_ERROR(job_.CheckParameterRange(first, count));
  switch (hint) {
    case ParameterHint::kPrefetch:
      job_.store->PrefetchParameters(first, count);
      break;
    case ParameterHint::kRelease:
      job_.store->ReleaseParameters(first, count);
      break;
  }
  return absl::OkStatus();
}

absl::Status StateReader::ReadParameters(uint64_t offset_bytes,
                                         absl::Span<std::byte> out) {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  OPTSTATE_RETURN_IF_ERROR(job_.CheckHasParameterArea());
  if (job_.recovery.has_value()) return job_.StillRecovering();
  OPTSTATE_RETURN_IF_ERROR(speculator_.RollBackSpeculation());
  const uint64_t area = job_.layout().parameter_area_bytes();
  if (offset_bytes > area || out.size() > area - offset_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(out.size(), " bytes from ", offset_bytes,
                     " of a parameter area of ", area));
  }
  CopyTo(out, job_.store->parameter_area().data() + offset_bytes);
  return absl::OkStatus();
}

}  // namespace optstate::session
