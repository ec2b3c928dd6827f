#include "server/session/transfer/range_checks.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::session {
namespace {

// Larger counts come from no training and would overflow in the next step.
constexpr int64_t kStepCountMax = int64_t{1} << 53;

}  // namespace

absl::Status CheckDataBytes(uint64_t expected, uint64_t found) {
  if (expected == found) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the elements take ", expected, " bytes, ", found, " were given"));
}

absl::Status CheckNoBegin(const ElementRange& range) {
  if (range.begin == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("there is one number per parameter: begin is ", range.begin,
                   ", it must be 0"));
}

absl::Status CheckNumbers(const JobContext& job, v1::StateArray array,
                          uint64_t first, uint64_t count, uint64_t bytes) {
  const OptimizerInfo& info = job.layout().optimizer_info();
  if (array == v1::STATE_ARRAY_SCALAR && info.scalar.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(info.name, " keeps no number per parameter"));
  }
  OPTSTATE_RETURN_IF_ERROR(job.CheckParameterRange(first, count));
  return CheckDataBytes(count * sizeof(int64_t), bytes);
}

absl::Status CheckNumber(const JobContext& job, v1::StateArray array,
                         uint64_t parameter, const std::byte* bytes) {
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
      absl::StrCat(job.layout().optimizer_info().scalar, " ", scalar,
                   " of parameter ", parameter, " is non-finite"));
}

const std::byte* NumbersAt(const JobContext& job, v1::StateArray array,
                           uint32_t parameter) {
  return array == v1::STATE_ARRAY_STEP_COUNT
             ? reinterpret_cast<const std::byte*>(
                   &job.store->step_counts()[parameter])
             : reinterpret_cast<const std::byte*>(
                   &job.store->scalars()[parameter]);
}

absl::StatusOr<size_t> FindPiece(const JobContext& job, uint32_t rank,
                                 const ElementRange& range) {
  const RankPartition& partition = job.shape->partitions[rank];
  const size_t i = partition.LowerBound(range.parameter);
  if (i < partition.pieces.size()) {
    const Piece& piece = partition.pieces[i];
    const ParameterSpec& spec = job.layout().parameters()[range.parameter];
    // An array without an entry per element belongs to the owner of the first.
    if (piece.parameter == range.parameter && piece.begin == 0 &&
        job.Elements().ElementsOf(range.array, spec) !=
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
                   " \"", job.layout().parameters()[range.parameter].name,
                   "\" do not belong to rank ", rank));
}

}  // namespace optstate::session
