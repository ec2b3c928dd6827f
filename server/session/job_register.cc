// Creates a job and changes its shape.

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/piece_table.h"
#include "server/session/admission.h"
#include "server/session/job_impl.h"
#include "server/session/job_storage.h"
#include "server/session/loss_scaler.h"
#include "spdlog/spdlog.h"

namespace optstate {
namespace {

// Returns the bytes that an engine keeps beside the state, without constants
// and the layout itself: a peer's message of kilobytes can ask for gigabytes of
// them.
uint64_t TableBytes(const JobDescription& description) {
  const uint64_t ranks = description.world_size;
  const uint64_t parameters = description.layout.parameters().size();
  const uint64_t groups = description.layout.groups().size();
  const uint64_t pieces = description.partition == PartitionMode::kReplicated
                              ? parameters * ranks
                              : parameters + ranks;
  // Covers RankPartition (a vector that grew), PieceTable, OpenStep, LoadRound
  // and MicroSteps.
  constexpr uint64_t kPieceBytes =
      2 * sizeof(Piece) + sizeof(PieceTable::Entry) + 3 * sizeof(uint64_t);
  // Covers a group's norms, decision, sub-group, and part of the layouts.
  constexpr uint64_t kGroupBytes = 256;
  return pieces * kPieceBytes +
         groups * (kGroupBytes + ranks * sizeof(Hyperparams));
}

}  // namespace

absl::StatusOr<RegisterResult> JobImpl::Register(const RegisterSpec& spec) {
  OPTSTATE_ASSIGN_OR_RETURN(JobDescription description, DescriptionOf(spec));
  absl::MutexLock lock(&mu_);
  RegisterResult result;
  if (shape_ == nullptr) OPTSTATE_RETURN_IF_ERROR(failure_);
  if (shape_ == nullptr && spec.unchanged) {
    return absl::NotFoundError(
        absl::StrCat("there is no job \"", options_.name, "\" any more"));
  }
  if (shape_ == nullptr) {
    OPTSTATE_RETURN_IF_ERROR(Create(spec, std::move(description)));
    result.created = true;
  } else {
    OPTSTATE_RETURN_IF_ERROR(RegisterAgain(spec, std::move(description)));
  }
  result.shape = shape_number_;
  result.layout_hash = layout_of_job().hash();
  result.committed_step = record().committed_step;
  result.phase = phase();
  result.storage = shape_->description.storage;
  return result;
}

absl::Status JobImpl::RegisterAgain(const RegisterSpec& spec,
                                    JobDescription description) {
  const absl::Status continues =
      layout_of_job().CheckSame(spec.layout, spec.extend);
  if (!continues.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        continues.message(), "; to begin anew, use another name than \"",
        options_.name, "\" or delete the job (optctl delete job ",
        options_.name, ")"));
  }
  OPTSTATE_RETURN_IF_ERROR(
      CheckSameStorage(shape_->description.storage, description.storage));
  description.storage = shape_->description.storage;
  absl::Status same = CheckSameSettings(shape_->description, description);
  if (same.ok()) return absl::OkStatus();
  if (AttachedCount() > 0 || spec.unchanged) return same;
  OPTSTATE_RETURN_IF_ERROR(CheckScalerStays(description));
  OPTSTATE_RETURN_IF_ERROR(CheckNoneHeld(spec.process));
  return Reshape(std::move(description));
}

// Refuses a registration that omits the job's scaler: the current scale would
// be lost, and gradients divided by a scale by which losses were not
// multiplied, or the other way round.
absl::Status JobImpl::CheckScalerStays(
    const JobDescription& description) const {
  if (!shape_->description.loss_scaler.has_value() ||
      description.loss_scaler.has_value()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", options_.name, "\" has a loss scaler, whose scale is ",
      record().loss_scale,
      ", and this session has none: attach with one (loss_scaler=), or delete "
      "the job (optctl delete job ",
      options_.name, ") and begin it without"));
}

absl::StatusOr<std::unique_ptr<JobImpl::Shape>> JobImpl::MakeShape(
    JobDescription description) {
  auto shape = std::make_unique<Shape>();
  shape->description = std::move(description);
  shape->text = SerializeDescription(shape->description);
  const JobDescription& what = shape->description;
  shape->partitions.reserve(what.world_size);
  for (uint32_t rank = 0; rank < what.world_size; ++rank) {
    OPTSTATE_ASSIGN_OR_RETURN(
        RankPartition partition,
        MakeRankPartition(what.layout, what.partition, what.world_size, rank));
    shape->partitions.push_back(std::move(partition));
  }
  return shape;
}

void JobImpl::SetLimits(const v1::Limits& limits) {
  absl::MutexLock lock(&mu_);
  *options_.config.mutable_limits() = limits;
}

std::string JobImpl::StateDir() const {
  return options_.config.state_dir().empty() ? options_.directory
                                             : options_.config.state_dir();
}

absl::Status JobImpl::AdmitShape(const JobDescription& description) const {
  OPTSTATE_RETURN_IF_ERROR(StepScheduler::CheckKernels(
      description.layout, description.accumulation()));
  AdmissionRequest request;
  request.directory = options_.directory;
  request.state_dir = StateDir();
  request.job_state_bytes =
      HostTier::BytesNeeded(description.layout, HostArraysOf(description));
  const HostTier::StepFileBytes files = StepFilesOf(description);
  request.job_state_bytes += files.undo + files.redo + files.speculation +
                             files.frames + files.frame_table;
  const uint64_t present = tier_.has_value() ? tier_->bytes() : 0;
  request.new_state_bytes =
      request.job_state_bytes > present ? request.job_state_bytes - present : 0;
  // The tables of the replaced shape are freed.
  const auto own_memory = [this](const JobDescription& of) {
    return TableBytes(of) +
           StepScheduler::WorkspaceBytes(of.layout, pool_.participants());
  };
  const uint64_t tables = own_memory(description);
  const uint64_t former = shape_ ? own_memory(shape_->description) : 0;
  request.table_bytes = tables > former ? tables - former : 0;
  request.uid = options_.uid;
  request.limits = options_.config.limits();
  return Annotate(Admit(request), absl::StrCat("job \"", options_.name, "\""));
}

// Records that are swapped are not speculated with: each would be written
// twice.
uint64_t JobImpl::SpeculationBytes(const JobDescription& description) const {
  return options_.config.engine().speculative() &&
                 !UsesDisk(description.storage) &&
                 StepScheduler::CanSpeculate(description.layout)
             ? StepScheduler::SpeculationBytes(description.layout)
             : 0;
}

HostArrays JobImpl::HostArraysOf(const JobDescription& description) {
  return {description.accumulation(), !UsesDisk(description.storage)};
}

HostTier::StepFileBytes JobImpl::StepFilesOf(
    const JobDescription& description) const {
  HostTier::StepFileBytes bytes = {
      .undo = StepScheduler::WorkerUndoBytes(pool_.participants()),
      .redo =
          StepScheduler::RedoBytes(description.layout, pool_.participants()),
      .speculation = SpeculationBytes(description)};
  if (!UsesDisk(description.storage)) return bytes;
  const NvmeStore::Sizes sizes = SwapSizesOf(description);
  bytes.frames = FrameBytesOf(description.storage, sizes);
  bytes.frame_table = sizes.table;
  return bytes;
}

absl::Status JobImpl::Create(const RegisterSpec& spec,
                             JobDescription description) {
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                            AdmissionLock::Take(StateDir()));
  const v1::StorageSettings asked = description.storage;
  OPTSTATE_RETURN_IF_ERROR(CheckStorage(asked, options_.config));
  description.storage = ResolveStorage(asked, options_.config,
                                       /*fits_in_memory=*/true);
  absl::Status admitted = AdmitShape(description);
  if (absl::IsResourceExhausted(admitted) &&
      asked.placement() == v1::PLACEMENT_AUTO) {
    description.storage = ResolveStorage(asked, options_.config,
                                         /*fits_in_memory=*/false);
    admitted = AdmitShape(description);
  }
  OPTSTATE_RETURN_IF_ERROR(admitted);
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Shape> shape,
                            MakeShape(std::move(description)));
  const JobDescription& what = shape->description;
  OPTSTATE_ASSIGN_OR_RETURN(
      tier_, HostTier::Create(options_.directory, what.layout,
                              HostArraysOf(what), SerializeDescription(what)));
  absl::Status used = UseShape(std::move(shape));
  if (used.ok()) {
    StartScaling(/*former=*/std::nullopt, spec.loss_scaler_state);
    return used;
  }
  nvme_ = nullptr;
  store_.reset();
  if (UsesDisk(shape_->description.storage)) {
    RemoveDiskDirectories(DiskDirectoriesOf(options_.config, options_.name));
  }
  shape_.reset();
  tier_.reset();
  HostTier::Remove(options_.directory).IgnoreError();
  return used;
}

absl::Status JobImpl::Reshape(JobDescription description) {
  if (recovery_.has_value()) return BeingFinished();
  const bool extended = description.layout.hash() != layout_of_job().hash();
  const std::optional<v1::LossScaler> scaler = shape_->description.loss_scaler;
  const bool scaler_changed = TextOf(description.loss_scaler) != TextOf(scaler);
  if (extended && !failure_.ok()) return failure_;
  if (extended && UsesDisk(description.storage)) {
    return absl::UnimplementedError(absl::StrCat(
        "job \"", options_.name,
        "\" has its records on disk (placement \"nvme\", or a durability): "
        "parameters cannot be "
        "added to it, nor the format of its masters be changed. Take a "
        "state_dict, "
        "delete the job and load it into a new one"));
  }
  const uint32_t first_new = parameter_count();
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                            AdmissionLock::Take(StateDir()));
  OPTSTATE_RETURN_IF_ERROR(AdmitShape(description));
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Shape> shape,
                            MakeShape(std::move(description)));
  const JobDescription& what = shape->description;
  // Runs change hands; no rank is attached that would miss its staged
  // gradients.
  for (uint32_t rank = 0; rank < kWorldSizeMax; ++rank) {
    rank_mark(rank).step = 0;
    ForgetLoss(rank);
  }
  scheduler_->ForgetStaged();
  // The record of a READY job asks for loads from its parameter count on, where
  // the new parameters begin: from here on the job is LOADING.
  absl::Status reshaped =
      tier_->Reshape(what.layout, HostArraysOf(what), StepFilesOf(what),
                     SerializeDescription(what));
  if (!reshaped.ok()) {
    // The job is unchanged, but its arrays may lie elsewhere. Its workspace is
    // freed before the next one is taken.
    scheduler_.reset();
    const absl::Status as_before = MakeScheduler();
    return as_before.ok() ? reshaped : LoseShape(as_before);
  }
  const absl::Status used = UseShape(std::move(shape));
  if (scaler_changed) StartScaling(scaler, /*state=*/std::nullopt);
  if (extended) {
    StepRecord next = record();
    next.load_required_from = std::min(next.load_required_from, first_new);
    PublishRecord(next, tier_->control());
  }
  return used.ok() ? used : LoseShape(used);
}

// Fails the job in this engine: its files are whole, but the engine lacks
// resources to work on them. No rank is attached, and the next engine may have
// more.
absl::Status JobImpl::LoseShape(const absl::Status& why) {
  failure_ = Annotate(
      why, absl::StrCat("job \"", options_.name,
                        "\" cannot go on in this engine; try it again (optctl "
                        "recover ",
                        options_.name, ") when there is room"));
  spdlog::error("{}", failure_.ToString());
  scheduler_.reset();
  ranks_.clear();
  open_step_ = OpenStep();
  micro_steps_ = MicroSteps();
  load_ = LoadRound();
  staged_load_.Reset({});
  nvme_ = nullptr;
  store_.reset();
  shape_.reset();
  tier_.reset();
  return failure_;
}

void JobImpl::StartScaling(const std::optional<v1::LossScaler>& former,
                           const std::optional<v1::LossScalerState>& state) {
  StepRecord next = record();
  const auto& scaler = shape_->description.loss_scaler;
  if (!scaler.has_value()) {
    next.loss_scale = 0;  // new job: none loses its scaler
  } else if (state.has_value()) {
    ContinueLossScaler(*state, &next);
  } else if (!former.has_value()) {
    StartLossScaler(*scaler, &next);
  } else {
    ChangeLossScaler(*former, *scaler, &next);
  }
  PublishRecord(next, tier_->control());
}

// Every rank registers anew after this, so none attaches with a gradient area
// of the former shape.
absl::Status JobImpl::UseShape(std::unique_ptr<Shape> shape,
                               const DurableCommit* restored) {
  scheduler_.reset();  // refers to the former layout and arrays
  // References to the former shape are replaced below, or dropped by the
  // caller.
  const std::unique_ptr<Shape> former = std::exchange(shape_, std::move(shape));
  ++shape_number_;
  OPTSTATE_RETURN_IF_ERROR(MakeScheduler(restored));
  const auto& partitions = shape_->partitions;
  ranks_.assign(partitions.size(), RankSession{});
  for (uint32_t rank = 0; rank < kWorldSizeMax; ++rank) {
    if (rank >= ranks_.size()) rank_mark(rank).attached = 0;
  }
  gradient_areas_.assign(partitions.size(), nullptr);
  intent_groups_.resize(layout_of_job().groups().size());
  group_norms_.resize(layout_of_job().groups().size());
  updated_of_group_.resize(parameter_count());
  gradient_norms_.resize(parameter_count());
  gradient_norms_step_ = 0;
  open_step_.Reset(&layout_of_job(), partitions, is_replicated());
  micro_steps_.Reset(&layout_of_job(), accumulates_together()
                                           ? shape_->description.world_size
                                           : 0);
  load_.Reset(&layout_of_job(), partitions);
  return absl::OkStatus();
}

absl::Status JobImpl::MakeScheduler(const DurableCommit* restored) {
  OPTSTATE_RETURN_IF_ERROR(
      tier_->ReserveStepFiles(StepFilesOf(shape_->description)));
  scheduler_.reset();
  // The former store has the same files.
  nvme_ = nullptr;
  store_.reset();
  OPTSTATE_ASSIGN_OR_RETURN(store_, MakeStore(restored));
  StepScheduler::Options options;
  options.store = store_.get();
  options.grain_elements = options_.config.engine().subgroup_elements();
  options.recovery = tier_->recovery();
  options.control = tier_->control();
  options.undo = tier_->undo();
  options.speculation = tier_->speculation();
  options.redo = tier_->redo();
  options.pool = &pool_;
  options.observer = options_.observer;
  OPTSTATE_ASSIGN_OR_RETURN(scheduler_, StepScheduler::Create(options));
  const absl::Status moved = scheduler_->MoveToNodes(placement_);
  if (!moved.ok()) {
    spdlog::warn(
        "state stays on the NUMA nodes where it is: job={} error=\"{}\"",
        options_.name, moved.ToString());
  }
  scheduler_->SetPartitions(shape_->partitions, is_replicated());
  return absl::OkStatus();
}

}  // namespace optstate
