// The session verbs that move state: load and fetch.

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/channel/channel.h"
#include "client/client.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

size_t ElementBytes(StateArray array, DType dtype) {
  return IsPerParameter(array) ? sizeof(int64_t) : SizeInBytes(dtype);
}

absl::Status CheckBytes(absl::string_view what, const ParameterSpec& parameter,
                        uint64_t expected, uint64_t found) {
  if (found == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " of parameter \"", parameter.name, "\" has ",
                   expected, " bytes, not ", found));
}

// Step 0 after no loads is how a message says that nothing is asked for: the
// daemon would count a load of which this session knew nothing.
absl::Status CheckBegin(const BeginAt& at) {
  if (at.step < kBeginAtStepEnd && at.loads_finished != 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a job cannot begin at step ", at.step, " after ", at.loads_finished,
      " loads: the step must be below 2^63, and there must be a load"));
}

}  // namespace

uint64_t ElementCount(const Layout& layout, StateArray array,
                      const ParameterSpec& parameter) {
  if (IsPerParameter(array)) return 1;
  const OptimizerInfo& info = layout.optimizer_info();
  const int index =
      static_cast<int>(array) - static_cast<int>(StateArray::kState0);
  if (index < 0 || static_cast<size_t>(index) >= info.state_arrays.size()) {
    return static_cast<uint64_t>(parameter.numel);
  }
  return StateElements(info, index, parameter.shape);
}

absl::Status Session::BeginLoad(LoadContent content) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckWhole()));
  loading_ = false;  // an earlier unfinished load is dropped
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(
      Persist([&] { return channel_->BeginLoad(StepDeadline()); })));
  loading_ = true;
  load_digest_.reset();
  if (content == LoadContent::kSame) load_digest_.emplace();
  ForgetStaged();
  begun_step_ = 0;
  return absl::OkStatus();
}

absl::Status Session::CheckLoading() const {
  if (loading_) return absl::OkStatus();
  return absl::FailedPreconditionError("no load was begun");
}

absl::Status Session::Load(StateArray array, uint32_t parameter, DType dtype,
                           absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckLoading()));
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckParameters(parameter, 1)));
  const ParameterSpec& spec = setup_->layout.parameters()[parameter];
  const uint64_t element_bytes = ElementBytes(array, dtype);
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckBytes(
      "data", spec, ElementCount(setup_->layout, array, spec) * element_bytes,
      data.size())));
  if (load_digest_) load_digest_->Add(array, parameter, dtype, data);
  const size_t at = setup_->partition.LowerBound(parameter);
  if (!OwnsAt(at, parameter)) return absl::OkStatus();
  const Piece& piece = setup_->partition.pieces[at];
  const uint64_t count = ElementCount(setup_->layout, array, spec);
  const bool by_element =
      !IsPerParameter(array) && count == static_cast<uint64_t>(spec.numel);
  // An array without a place for each element belongs to the owner of the first
  // element.
  if (!by_element && !IsPerParameter(array) && piece.begin != 0) {
    return absl::OkStatus();
  }
  const uint64_t end = by_element ? piece.begin + piece.numel : count;
  const uint64_t most = channel_->transfer_bytes_max() / element_bytes;
  for (uint64_t begin = by_element ? piece.begin : 0; begin < end;
       begin += most) {
    const uint64_t numel = std::min(most, end - begin);
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(Persist([&] {
      return channel_->Load(
          array, parameter, begin, dtype,
          data.subspan(begin * element_bytes, numel * element_bytes),
          StepDeadline());
    })));
  }
  return absl::OkStatus();
}

absl::Status Session::CheckTakesBeginAt() const {
  if (takes_begin_at_) return absl::OkStatus();
  return absl::UnimplementedError(
      "the daemon is of an older build, in which no job begins at the step of "
      "another one: upgrade it (optctl upgrade), and try again");
}

absl::Status Session::FinishLoad(std::optional<BeginAt> begin_at) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckLoading()));
  if (begin_at) {
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckTakesBeginAt()));
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckBegin(*begin_at)));
  }
  finishing_load_ = true;
  begin_at_ = begin_at;
  const LoadEnd end = {
      .content_digest = load_digest_ ? load_digest_->value() : 0,
      .begin_at = begin_at};
  const absl::Status status = Persist([&] {
    return loading_ ? channel_->FinishLoad(end, StepDeadline())
                    : absl::OkStatus();
  });
  finishing_load_ = false;
  begin_at_.reset();
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(status));
  if (loading_ && loads_finished_) ++*loads_finished_;
  if (begin_at) {
    committed_step_ = begin_at->step;
    loads_finished_ = begin_at->loads_finished;
  }
  loading_ = false;
  phase_ = JobPhase::kReady;
  return CheckParameterArea();
}

absl::StatusOr<uint64_t> Session::Fetch(StateArray array, uint32_t parameter,
                                        absl::Span<std::byte> out) {
  const FetchTarget target = {
      .array = array, .parameter = parameter, .out = out};
  return FetchMany({&target, 1});
}

// No step is applied in between, because a step needs this rank's commit.
absl::StatusOr<uint64_t> Session::FetchMany(
    absl::Span<const FetchTarget> targets) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
  std::vector<FetchRange> ranges;
  ranges.reserve(targets.size());
  for (const FetchTarget& target : targets) {
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(AppendRanges(target, &ranges)));
  }
  uint64_t step = committed_step_;
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(Persist([&]() -> absl::Status {
    step = committed_step_;
    if (ranges.empty()) return absl::OkStatus();
    OPTSTATE_ASSIGN_OR_RETURN(step, channel_->Fetch(ranges, StepDeadline()));
    return absl::OkStatus();
  })));
  return step;
}

absl::Status Session::HintParameters(ParameterHint hint,
                                     absl::Span<const uint32_t> parameters) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
  for (const uint32_t p : parameters) {
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckParameters(p, 1)));
  }
  for (size_t i = 0; i < parameters.size();) {
    size_t end = i + 1;
    while (end < parameters.size() &&
           parameters[end] == parameters[end - 1] + 1) {
      ++end;
    }
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(Persist([&] {
      return channel_->HintParameters(
          hint, parameters[i], static_cast<uint32_t>(end - i), StepDeadline());
    })));
    i = end;
  }
  return absl::OkStatus();
}

absl::Status Session::AppendRanges(const FetchTarget& target,
                                   std::vector<FetchRange>* ranges) const {
  OPTSTATE_RETURN_IF_ERROR(CheckParameters(target.parameter, 1));
  const ParameterSpec& spec = setup_->layout.parameters()[target.parameter];
  const uint64_t element_bytes = ElementBytes(
      target.array,
      target.array == StateArray::kParameter ? spec.dtype : DType::kFloat32);
  OPTSTATE_RETURN_IF_ERROR(CheckBytes(
      "the array", spec,
      ElementCount(setup_->layout, target.array, spec) * element_bytes,
      target.out.size()));
  const uint64_t most = channel_->transfer_bytes_max();
  for (uint64_t offset = 0; offset < target.out.size(); offset += most) {
    const uint64_t bytes = std::min<uint64_t>(most, target.out.size() - offset);
    ranges->push_back({.array = target.array,
                       .parameter = target.parameter,
                       .begin = offset / element_bytes,
                       .element_bytes = element_bytes,
                       .out = target.out.subspan(offset, bytes)});
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
