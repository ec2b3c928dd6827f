#include "client/fake/fake_daemon_job.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

bool Same(const Hyperparams& a, const Hyperparams& b) {
  return a.value == b.value && a.max_norm == b.max_norm;
}

// Compares everything except found_inf, which may differ from rank to rank.
bool SameContent(const CommitOptions& a, const CommitOptions& b) {
  return a.step == b.step && a.grad_scale == b.grad_scale &&
         a.max_norm == b.max_norm && a.clips_with == b.clips_with &&
         std::equal(a.groups.begin(), a.groups.end(), b.groups.begin(),
                    b.groups.end(), Same);
}

bool NotNegative(double value) { return value >= 0 && std::isfinite(value); }

}  // namespace

FakeDaemonJob::FakeDaemonJob(const ChannelSetup& setup) : setup_(setup) {
  parameters_.resize(setup.layout.parameter_area_bytes());
  for (const ParameterSpec& parameter : setup.layout.parameters()) {
    const std::vector<float> zeros(static_cast<size_t>(parameter.numel));
    states_.push_back({.master = zeros,
                       .exp_avg = zeros,
                       .exp_avg_sq = zeros,
                       .max_exp_avg_sq = zeros,
                       .step_count = 0});
  }
  ranks_.resize(setup.world_size);
}

absl::Status FakeDaemonJob::CheckRegister(const ChannelSetup& setup) const {
  OPTSTATE_RETURN_IF_ERROR(
      setup_.layout.CheckSame(setup.layout, /*allow_extension=*/false));
  if (setup.world_size == setup_.world_size &&
      setup.partition_mode == setup_.partition_mode) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the job has a world of ", setup_.world_size,
                   " ranks and another partition"));
}

absl::Status FakeDaemonJob::Attach(const ChannelSetup& setup,
                                   const std::byte* gradient_area) {
  Rank& rank = ranks_[setup.rank];
  if (rank.attached) {
    return absl::AlreadyExistsError(
        absl::StrCat("rank ", setup.rank, " is attached"));
  }
  rank.attached = true;
  rank.partition = setup.partition;
  rank.gradient_area = gradient_area;
  rank.staged.assign(rank.partition.pieces.size(), Staged());
  had_session_ = true;
  return absl::OkStatus();
}

void FakeDaemonJob::Detach(uint32_t index) {
  Rank& rank = ranks_[index];
  DropStaged(index);
  rank.attached = false;
  rank.answer.reset();
  rank.in_load = false;
}

Attached FakeDaemonJob::Describe() const {
  Attached attached;
  attached.committed_step = committed_step_;
  attached.phase = ready_ ? JobPhase::kReady : JobPhase::kLoading;
  attached.last_outcome = last_outcome_;
  attached.loads_finished = loads_finished_;
  return attached;
}

bool FakeDaemonJob::finished() const {
  return setup_.ephemeral && had_session_ &&
         std::none_of(ranks_.begin(), ranks_.end(),
                      [](const Rank& rank) { return rank.attached; });
}

absl::Status FakeDaemonJob::CheckStep(uint64_t step) const {
  if (!ready_) return absl::FailedPreconditionError("the job is loading");
  if (step == committed_step_ + 1) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("step ", step, " is out of order: the job has committed ",
                   "step ", committed_step_));
}

std::vector<float> FakeDaemonJob::ReadPiece(const Rank& rank,
                                            const Piece& piece) const {
  const DType dtype =
      setup_.layout.parameters()[piece.parameter].gradient_dtype;
  std::vector<float> values(piece.numel);
  for (uint64_t i = 0; i < piece.numel; ++i) {
    values[i] =
        LoadElement(dtype, rank.gradient_area + piece.gradient_offset_bytes, i);
  }
  return values;
}

absl::Status FakeDaemonJob::Push(uint32_t index, const PushRange& range) {
  OPTSTATE_RETURN_IF_ERROR(CheckStep(range.step));
  Rank& rank = ranks_[index];
  if (rank.commit) {
    return absl::FailedPreconditionError("the rank has committed this step");
  }
  const size_t end =
      rank.partition.LowerBound(range.first_parameter + range.parameter_count);
  for (size_t i = rank.partition.LowerBound(range.first_parameter); i < end;
       ++i) {
    Staged& staged = rank.staged[i];
    if (staged.any && range.micro_step == staged.micro_step) continue;
    if (staged.any &&
        (!setup_.accumulate || range.micro_step < staged.micro_step)) {
      return absl::FailedPreconditionError(
          absl::StrCat("parameter ", rank.partition.pieces[i].parameter,
                       " was pushed already in this step"));
    }
    std::vector<float> gradient = ReadPiece(rank, rank.partition.pieces[i]);
    if (staged.any) {
      for (size_t k = 0; k < gradient.size(); ++k) {
        staged.sum[k] += gradient[k];
      }
    } else {
      staged.sum = std::move(gradient);
    }
    staged.any = true;
    staged.micro_step = range.micro_step;
  }
  return absl::OkStatus();
}

absl::Status FakeDaemonJob::CheckContent(const CommitOptions& options) const {
  for (const Hyperparams& group : options.groups) {
    OPTSTATE_RETURN_IF_ERROR(Validate(setup_.layout.optimizer(), group));
  }
  if (!(options.grad_scale > 0) || !NotNegative(options.max_norm)) {
    return absl::InvalidArgumentError("Invalid grad_scale or max_norm");
  }
  return absl::OkStatus();
}

absl::Status FakeDaemonJob::CheckRepeat(const CommitOptions& options) const {
  if (SameContent(options, *last_commit_)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "step ", options.step, " is committed already, with other content"));
}

absl::StatusOr<bool> FakeDaemonJob::Commit(uint32_t index,
                                           const CommitOptions& options) {
  Rank& rank = ranks_[index];
  OPTSTATE_RETURN_IF_ERROR(CheckContent(options));
  if (last_commit_ && options.step == committed_step_) {
    OPTSTATE_RETURN_IF_ERROR(CheckRepeat(options));
    rank.answer = *last_outcome_;
    return false;
  }
  OPTSTATE_RETURN_IF_ERROR(CheckStep(options.step));
  if (rank.commit) {
    return absl::FailedPreconditionError("the rank has committed already");
  }
  rank.commit = options;
  if (!AllCommitted()) return false;
  const absl::StatusOr<Outcome> outcome = TakeStep();
  for (uint32_t i = 0; i < ranks_.size(); ++i) {
    ranks_[i].answer = outcome;
    DropStaged(i);
  }
  return true;
}

bool FakeDaemonJob::AllCommitted() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& rank) { return rank.commit.has_value(); });
}

absl::Status FakeDaemonJob::GatherGradients(Gradients* gradients) {
  gradients->assign(states_.size(), std::nullopt);
  for (uint32_t parameter = 0; parameter < states_.size(); ++parameter) {
    std::vector<float> whole(states_[parameter].master.size());
    size_t pieces = 0;
    size_t staged = 0;
    for (const Rank& rank : ranks_) {
      const size_t at = rank.partition.LowerBound(parameter);
      if (at == rank.partition.pieces.size() ||
          rank.partition.pieces[at].parameter != parameter) {
        continue;
      }
      ++pieces;
      if (!rank.staged[at].any) continue;
      ++staged;
      std::copy(rank.staged[at].sum.begin(), rank.staged[at].sum.end(),
                whole.begin() +
                    static_cast<ptrdiff_t>(rank.partition.pieces[at].begin));
    }
    if (staged != 0 && staged != pieces) {
      return absl::FailedPreconditionError(absl::StrCat(
          "only ", staged, " of ", pieces, " pieces of parameter \"",
          setup_.layout.parameters()[parameter].name, "\" were pushed"));
    }
    if (staged != 0) (*gradients)[parameter] = std::move(whole);
  }
  return absl::OkStatus();
}

double FakeDaemonJob::SumOfSquares(const Gradients& gradients) const {
  double sum = 0;
  for (const auto& gradient : gradients) {
    if (!gradient) continue;
    for (const float g : *gradient) sum += double{g} * double{g};
  }
  return sum;
}

absl::StatusOr<Outcome> FakeDaemonJob::TakeStep() {
  const CommitOptions& options = *ranks_[0].commit;
  bool found_inf = false;
  for (const Rank& rank : ranks_) {
    found_inf |= rank.commit->found_inf;
    if (!SameContent(options, *rank.commit)) {
      return absl::FailedPreconditionError("the ranks' commits differ");
    }
  }
  Gradients gradients;
  OPTSTATE_RETURN_IF_ERROR(GatherGradients(&gradients));
  const double sum = SumOfSquares(gradients);
  Outcome outcome;
  outcome.step = options.step;
  outcome.gradient_norm = std::sqrt(sum) / options.grad_scale;
  outcome.found_inf = found_inf || !std::isfinite(sum);
  outcome.applied = !outcome.found_inf;
  if (outcome.applied && options.max_norm != 0) {
    outcome.clip_coefficient =
        std::min(1.0, options.max_norm / (outcome.gradient_norm + 1e-6));
  }
  for (uint32_t i = 0; outcome.applied && i < gradients.size(); ++i) {
    const ParameterSpec& parameter = setup_.layout.parameters()[i];
    if (!gradients[i]) continue;
    FakeUpdate(setup_.layout.optimizer(),
               setup_.layout.has_state_array(2, parameter.group),
               options.groups[parameter.group],
               outcome.clip_coefficient / options.grad_scale, *gradients[i],
               &states_[i]);
  }
  StorePieces();
  committed_step_ = options.step;
  last_outcome_ = outcome;
  last_commit_ = options;
  return outcome;
}

void FakeDaemonJob::StorePieces() {
  for (uint32_t i = 0; i < states_.size(); ++i) {
    std::byte* const area =
        parameters_.data() + setup_.layout.parameter_offset_bytes(i);
    for (size_t k = 0; k < states_[i].master.size(); ++k) {
      StoreElement(setup_.layout.parameters()[i].dtype, area, k,
                   states_[i].master[k]);
    }
  }
}

void FakeDaemonJob::DropStaged(uint32_t rank) {
  ranks_[rank].commit.reset();
  for (Staged& staged : ranks_[rank].staged) staged = Staged();
}

absl::Status FakeDaemonJob::Abort(uint32_t rank, uint64_t step) {
  if (step != committed_step_ + 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", step, " cannot be aborted"));
  }
  if (ranks_[rank].commit) ranks_[rank].answer = absl::AbortedError("aborted");
  DropStaged(rank);
  return absl::OkStatus();
}

bool FakeDaemonJob::loading() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& rank) { return !rank.loaded; });
}

absl::Status FakeDaemonJob::BeginLoad(uint32_t rank) {
  if (ready_) {
    for (Rank& each : ranks_) each.loaded = false;
    ready_ = false;
  }
  ranks_[rank].in_load = true;
  DropStaged(rank);
  return absl::OkStatus();
}

absl::Status FakeDaemonJob::Load(uint32_t rank, StateArray array,
                                 uint32_t parameter, uint64_t begin,
                                 DType dtype,
                                 absl::Span<const std::byte> data) {
  if (!ranks_[rank].in_load) {
    return absl::FailedPreconditionError("no load was begun");
  }
  if (IsPerParameter(array)) {
    std::memcpy(&states_[parameter].step_count, data.data(), sizeof(int64_t));
    return absl::OkStatus();
  }
  std::vector<float>* const values = Array(array, parameter);
  if (values == nullptr) {
    return absl::InvalidArgumentError("the job has no such array");
  }
  for (uint64_t i = 0; i < data.size() / SizeInBytes(dtype); ++i) {
    (*values)[begin + i] = LoadElement(dtype, data.data(), i);
  }
  return absl::OkStatus();
}

absl::Status FakeDaemonJob::FinishLoad(uint32_t rank, const LoadEnd& end) {
  if (!ranks_[rank].in_load) {
    return absl::FailedPreconditionError("no load was begun");
  }
  if (end.begin_at.has_value()) {
    if (end.begin_at->step >= kBeginAtStepEnd ||
        end.begin_at->loads_finished == 0) {
      return absl::InvalidArgumentError("no job begins there");
    }
    if (committed_step_ != 0) {
      return absl::FailedPreconditionError("the job has taken a step");
    }
  }
  ranks_[rank].in_load = false;
  ranks_[rank].loaded = true;
  if (loading()) return absl::OkStatus();
  ready_ = true;
  ++loads_finished_;
  if (end.begin_at.has_value()) {
    committed_step_ = end.begin_at->step;
    loads_finished_ = end.begin_at->loads_finished;
  }
  StorePieces();
  return absl::OkStatus();
}

std::vector<float>* FakeDaemonJob::Array(StateArray array, uint32_t parameter) {
  FakeState& state = states_[parameter];
  switch (array) {
    case StateArray::kMaster:
      return &state.master;
    case StateArray::kState0:
      return &state.exp_avg;
    case StateArray::kState1:
      return &state.exp_avg_sq;
    case StateArray::kState2:
      return setup_.layout.has_state_array(2) ? &state.max_exp_avg_sq : nullptr;
    case StateArray::kStepCount:
    case StateArray::kScalar:
    case StateArray::kGradientNorm:
    case StateArray::kParameter:
    case StateArray::kPreparedSum:
      break;
  }
  return nullptr;
}

absl::Status FakeDaemonJob::Fetch(StateArray array, uint32_t parameter,
                                  uint64_t begin,
                                  absl::Span<std::byte> out) const {
  if (IsPerParameter(array)) {
    std::memcpy(out.data(), &states_[parameter].step_count, sizeof(int64_t));
    return absl::OkStatus();
  }
  if (array == StateArray::kParameter) {
    const Layout& layout = setup_.layout;
    std::memcpy(out.data(),
                parameters_.data() + layout.parameter_offset_bytes(parameter) +
                    begin * SizeInBytes(layout.parameters()[parameter].dtype),
                out.size());
    return absl::OkStatus();
  }
  const std::vector<float>* const values =
      const_cast<FakeDaemonJob*>(this)->Array(array, parameter);
  if (values == nullptr) {
    return absl::InvalidArgumentError("the job has no such array");
  }
  std::memcpy(out.data(), values->data() + begin, out.size());
  return absl::OkStatus();
}

}  // namespace optstate::client
