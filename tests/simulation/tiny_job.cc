#include "tests/simulation/tiny_job.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/dtype.h"
#include "proto/types/status_macros.h"
#include "tests/simulation/trace.h"

namespace optstate::simulation {
namespace {

Layout MakeLayout() {
  LayoutSpec spec;
  spec.groups = {{}};
  for (uint32_t p = 0; p < TinyJob::kParameters; ++p) {
    ParameterSpec parameter;
    parameter.name = absl::StrCat("layer", p);
    parameter.shape = {int64_t{TinyJob::kElements}};
    parameter.numel = int64_t{TinyJob::kElements};
    spec.parameters.push_back(std::move(parameter));
  }
  absl::StatusOr<Layout> layout = Layout::Make(std::move(spec));
  if (layout.ok()) return *std::move(layout);
  std::fprintf(stderr, "the layout is wrong: %s\n",
               layout.status().ToString().c_str());
  std::abort();
}

// Returns a number in [-1/16, 1/16) that looks random (splitmix64).
float Value(uint64_t step, uint64_t element) {
  uint64_t z = (step * 0x10001 + element + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  z ^= z >> 31;
  const auto signed_part =
      static_cast<float>(static_cast<int32_t>(z >> 40) - (1 << 23));
  return signed_part * 0x1p-27F;
}

absl::Span<const std::byte> AsBytes(absl::Span<const float> values) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                             values.size() * sizeof(float));
}

// Takes the answer of a job whose only rank waits for nobody.
class OneAnswer final : public session::SessionListener {
 public:
  void OnStepDone(uint64_t /*request_id*/, const absl::Status& status,
                  const session::StepOutcome& /*outcome*/) override {
    status_ = status;
    ++answers_;
  }
  absl::Status Take() {
    if (answers_ != 1) return absl::InternalError("no answer, or several");
    answers_ = 0;
    return status_;
  }

 private:
  int answers_ = 0;
  absl::Status status_;
};

}  // namespace

TinyJob::TinyJob(uint32_t ranks)
    : ranks_(ranks),
      layout_(MakeLayout()),
      groups_(1, AdamHyperparams{.lr = 1e-2, .weight_decay = 1e-2}) {}

session::RegisterSpec TinyJob::RegisterSpecOf(uint32_t rank, uint32_t node,
                                              bool comes_back) const {
  session::RegisterSpec spec;
  spec.layout = layout_;
  spec.rank = rank;
  spec.world_size = ranks_;
  spec.local_world_size = ranks_;
  spec.host_id = absl::StrCat("node-", node);
  spec.partition = PartitionMode::kGreedy;
  spec.unchanged = comes_back;
  return spec;
}

v1::DaemonConfig TinyJob::ConfigOf(const std::string& state_dir) const {
  v1::DaemonConfig config;
  config.set_state_dir(state_dir);
  config.set_lock_memory(v1::LOCK_MEMORY_NEVER);
  v1::EngineSettings& engine = *config.mutable_engine();
  engine.set_workers(1);  // the caller alone: there are no threads
  engine.set_subgroup_elements(kTileElements);
  engine.set_pinning(v1::PINNING_NEVER);
  engine.set_restarts_max(5);
  engine.set_restart_window_s(60);
  // A second generation of ranks finds the places of the first one taken, until
  // the daemon looks which of those have ended.
  v1::Limits& limits = *config.mutable_limits();
  limits.set_jobs_max(4);
  limits.set_user_jobs_max(2);
  limits.set_sessions_max(2 * ranks_ + 4);
  limits.set_user_sessions_max(ranks_ + 2);
  return config;
}

absl::Span<const float> TinyJob::ValuesOf(uint64_t step) {
  if (step != values_step_) {
    values_.resize(size_t{kParameters} * kElements);
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = Value(step, i);
    values_step_ = step;
  }
  return values_;
}

session::CommitSpec TinyJob::CommitOf(uint64_t step, bool two_phase,
                                      bool found_inf) {
  session::CommitSpec spec;
  spec.step = step;
  // A learning rate of each step's own: a step that is taken in place of
  // another one shows.
  groups_[0][kLr] = 1e-2 / static_cast<double>(1 + step % 7);
  spec.groups = groups_;
  spec.max_norm = 0.5;
  spec.found_inf = found_inf;
  spec.two_phase = two_phase;
  return spec;
}

uint64_t TinyJob::AppliedUpTo(uint64_t step) {
  uint64_t applied = 0;
  for (uint64_t each = 1; each <= step; ++each) applied += !IsSkipped(each);
  return applied;
}

absl::Status TinyJob::LoadMasters(session::Job* job, uint32_t rank,
                                  const std::vector<Piece>& pieces) {
  const absl::Span<const float> values = ValuesOf(0);
  for (const Piece& piece : pieces) {
    const absl::Span<const float> part =
        OfParameter(values, piece.parameter).subspan(piece.begin, piece.numel);
    OPTSTATE_RETURN_IF_ERROR(
        job->Load(rank, v1::STATE_ARRAY_MASTER, piece.parameter, piece.begin,
                  piece.numel, DType::kFloat32, AsBytes(part)));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> TinyJob::DigestOf(session::Job* job,
                                           uint64_t step) const {
  std::vector<int64_t> counts(kParameters);
  OPTSTATE_ASSIGN_OR_RETURN(
      const uint64_t committed,
      job->Fetch(v1::STATE_ARRAY_STEP_COUNT, 0, 0, counts.size(),
                 absl::MakeSpan(reinterpret_cast<std::byte*>(counts.data()),
                                counts.size() * sizeof(int64_t))));
  if (committed != step) {
    return absl::InternalError(
        absl::StrCat("the job is at step ", committed, ", not ", step));
  }
  const uint64_t applied = AppliedUpTo(step);
  Trace digest;
  for (uint32_t p = 0; p < kParameters; ++p) {
    if (counts[p] != static_cast<int64_t>(applied)) {
      return absl::InternalError(absl::StrCat(
          "parameter ", p, " has taken ", counts[p], " steps at step ", step,
          ", of which ", applied, " were to be applied"));
    }
    for (const v1::StateArray array :
         {v1::STATE_ARRAY_MASTER, v1::STATE_ARRAY_STATE_0,
          v1::STATE_ARRAY_STATE_1}) {
      std::vector<std::byte> bytes(kElements * sizeof(float));
      OPTSTATE_RETURN_IF_ERROR(
          job->Fetch(array, p, 0, kElements, absl::MakeSpan(bytes)).status());
      digest.Add(bytes);
    }
  }
  return digest.hash();
}

absl::StatusOr<uint64_t> TinyJob::UndisturbedDigest(
    const std::string& state_dir, uint64_t step) const {
  TinyJob alone(1);
  session::Job::Options options;
  options.name = kName;
  options.directory = state_dir;
  options.config = alone.ConfigOf(state_dir);
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<session::Job> job,
                            session::Job::Open(std::move(options)));
  OPTSTATE_RETURN_IF_ERROR(
      job->Register(alone.RegisterSpecOf(0, 0, /*comes_back=*/false)).status());
  OPTSTATE_ASSIGN_OR_RETURN(const RankPartition* const partition,
                            job->partition(0));
  std::vector<std::byte> area(partition->gradient_area_bytes);
  OneAnswer answer;
  session::AttachSpec attach;
  attach.layout_hash = alone.layout().hash();
  attach.gradient_area = area.data();
  attach.gradient_area_bytes = area.size();
  attach.listener = &answer;
  OPTSTATE_RETURN_IF_ERROR(job->Attach(attach).status());
  const std::vector<Piece> pieces = partition->pieces;
  OPTSTATE_RETURN_IF_ERROR(job->BeginLoad(0));
  OPTSTATE_RETURN_IF_ERROR(alone.LoadMasters(job.get(), 0, pieces));
  job->FinishLoad(0, /*request_id=*/1, {});
  OPTSTATE_RETURN_IF_ERROR(answer.Take());
  for (uint64_t each = 1; each <= step; ++each) {
    const absl::Span<const float> gradients = alone.ValuesOf(each);
    for (const Piece& piece : pieces) {
      const absl::Span<const std::byte> bytes =
          AsBytes(OfParameter(gradients, piece.parameter)
                      .subspan(piece.begin, piece.numel));
      std::copy(
          bytes.begin(), bytes.end(),
          area.begin() + static_cast<int64_t>(piece.gradient_offset_bytes));
    }
    OPTSTATE_RETURN_IF_ERROR(job->Push(0, each, 0, 0, kParameters));
    job->Commit(0, /*request_id=*/1 + each,
                alone.CommitOf(each, /*two_phase=*/false, IsSkipped(each)));
    OPTSTATE_RETURN_IF_ERROR(answer.Take());
  }
  absl::StatusOr<uint64_t> digest = alone.DigestOf(job.get(), step);
  job->Leave(0);
  return digest;
}

}  // namespace optstate::simulation
