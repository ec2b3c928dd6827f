// Reads the state of a job.

#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "server/session/job_impl.h"

namespace optstate {
namespace {

// Calls memcpy, but permits null pointers when there is nothing to copy.
void CopyTo(absl::Span<std::byte> out, const void* from) {
  if (!out.empty()) std::memcpy(out.data(), from, out.size());
}

}  // namespace

absl::StatusOr<uint64_t> JobImpl::Fetch(v1::StateArray array,
                                        uint32_t parameter, uint64_t begin,
                                        uint64_t numel,
                                        absl::Span<std::byte> out) {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(failure_);
  if (recovery_.has_value()) return BeingFinished();
  OPTSTATE_RETURN_IF_ERROR(TakeBackSpeculation());
  if (phase() != v1::JOB_PHASE_READY) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", options_.name, "\" is loading: its state is of no step"));
  }
  const ElementRange range = {array, parameter, begin, numel};
  if (ElementAccess::IsPerParameter(array)) {
    OPTSTATE_RETURN_IF_ERROR(CheckNoBegin(range));
    OPTSTATE_RETURN_IF_ERROR(CheckNumbers(array, parameter, numel, out.size()));
    CopyTo(out, NumbersAt(array, parameter));
    return record().committed_step;
  }
  if (array == v1::STATE_ARRAY_GRADIENT_NORM) {
    OPTSTATE_RETURN_IF_ERROR(CheckGradientNorms());
    OPTSTATE_RETURN_IF_ERROR(CheckNoBegin(range));
    OPTSTATE_RETURN_IF_ERROR(CheckNumbers(array, parameter, numel, out.size()));
    CopyTo(out, gradient_norms_.data() + parameter);
    return record().committed_step;
  }
  OPTSTATE_RETURN_IF_ERROR(CheckParameterRange(parameter, 1));
  const ElementAccess elements = Elements();
  OPTSTATE_RETURN_IF_ERROR(elements.Check(range));
  OPTSTATE_RETURN_IF_ERROR(CheckDataBytes(numel * sizeof(float), out.size()));
  float block[ElementAccess::kBlockElements];
  for (uint64_t i = 0; i < numel; i += std::size(block)) {
    const uint64_t count = std::min<uint64_t>(numel - i, std::size(block));
    OPTSTATE_RETURN_IF_ERROR(
        elements.ReadFloats({array, parameter, begin + i, count}, block));
    std::memcpy(out.data() + i * sizeof(float), block, count * sizeof(float));
  }
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
  OPTSTATE_RETURN_IF_ERROR(TakeBackSpeculation());
  const uint64_t area = layout_of_job().parameter_area_bytes();
  if (offset_bytes > area || out.size() > area - offset_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(out.size(), " bytes from ", offset_bytes,
                     " of a parameter area of ", area));
  }
  CopyTo(out, store_->parameter_area().data() + offset_bytes);
  return absl::OkStatus();
}

}  // namespace optstate
