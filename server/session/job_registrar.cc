#include "server/session/job_registrar.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/admission.h"
#include "server/session/devices/device_updates.h"
#include "server/session/devices/resident_sizes.h"
#include "server/session/durability/disk_claim.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/rearrangement.h"
#include "server/session/durability/store_maker.h"
#include "server/session/steps/loss_scaler.h"
#include "server/session/tiers/disk_rates.h"
#include "server/session/tiers/job_placer.h"
#include "server/session/tiers/node_budget.h"
#include "server/session/tiers/quota_rooms.h"
#include "spdlog/spdlog.h"
#include "storage/swap_sizes.h"

namespace optstate::session {

absl::StatusOr<RegisterResult> JobRegistrar::Register(
    const RegisterSpec& spec, JobDescription description) {
  RegisterResult result;
  if (job_.shape == nullptr) OPTSTATE_RETURN_IF_ERROR(job_.failure);
  if (job_.shape == nullptr && spec.unchanged) {
    return absl::NotFoundError(
        absl::StrCat("there is no job \"", job_.options.name, "\" any more"));
  }
  if (job_.shape == nullptr) {
    OPTSTATE_RETURN_IF_ERROR(Create(spec, std::move(description)));
    result.created = true;
  } else {
    OPTSTATE_RETURN_IF_ERROR(RegisterAgain(spec, std::move(description)));
  }
  result.shape = job_.shape_number;
  result.layout_hash = job_.layout().hash();
  result.committed_step = job_.record().committed_step;
  result.phase = job_.phase();
  result.storage = job_.shape->description.storage;
  return result;
}

absl::Status JobRegistrar::RegisterAgain(const RegisterSpec& spec,
                                         JobDescription description) {
  const absl::Status continues =
      job_.layout().CheckSame(spec.layout, spec.extend);
  if (!continues.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        continues.message(), "; to begin anew, use another name than \"",
        job_.options.name, "\" or delete the job (optctl delete job ",
        job_.options.name, ")"));
  }
  OPTSTATE_RETURN_IF_ERROR(
      CheckSameStorage(job_.shape->description.storage, description.storage));
  const v1::StorageSettings& now = job_.shape->description.storage;
  const bool is_default =
      description.storage.host_budget_bytes() == 0 && !now.has_made_with();
  description.storage = now;
  if (is_default && now.placement() == v1::PLACEMENT_NVME &&
      description.layout.hash() != job_.layout().hash()) {
    // A default that is too small becomes the least, as that of a new job does.
    description.storage.set_host_budget_bytes(std::max(
        now.host_budget_bytes(), LeastBudget(SwapSizesOf(job_, description))));
  }
  absl::Status same = CheckSameSettings(job_.shape->description, description);
  if (same.ok()) return absl::OkStatus();
  if (ranks_.AttachedCount() > 0 || spec.unchanged) return same;
  OPTSTATE_RETURN_IF_ERROR(CheckScalerStays(description));
  OPTSTATE_RETURN_IF_ERROR(ranks_.CheckNoneHeld(spec.process));
  return Reshape(std::move(description));
}

// Refuses a registration that omits the job's scaler: the current scale would
// be lost, and gradients divided by a scale by which losses were not
// multiplied, or the other way round.
absl::Status JobRegistrar::CheckScalerStays(
    const JobDescription& description) const {
  if (!job_.shape->description.loss_scaler.has_value() ||
      description.loss_scaler.has_value()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", job_.options.name, "\" has a loss scaler, whose scale is ",
      job_.record().loss_scale,
      ", and this session has none: attach with one (loss_scaler=), or delete "
      "the job (optctl delete job ",
      job_.options.name, ") and begin it without"));
}

absl::Status JobRegistrar::AdmitShape(const JobDescription& description) const {
  OPTSTATE_RETURN_IF_ERROR(CheckSpeculation(description));
  if (OffloadFractionOf(description.storage) < 1) {
    OPTSTATE_RETURN_IF_ERROR(CheckResidents(description));
  }
  OPTSTATE_RETURN_IF_ERROR(scheduler::StepScheduler::CheckKernels(
      description.layout, description.accumulation()));
  AdmissionRequest request;
  request.directory = job_.options.directory;
  request.state_dir = job_.StateDir();
  request.job_state_bytes = storage::HostTier::BytesNeeded(
      description.layout, HostArraysOf(description));
  const storage::HostTier::StepFileBytes files = StepFilesOf(description);
  request.job_state_bytes += files.undo + files.redo + files.speculation +
                             files.frames + files.frame_table +
                             files.gradient_log;
  const uint64_t present = job_.tier.has_value() ? job_.tier->bytes() : 0;
  request.new_state_bytes =
      request.job_state_bytes > present ? request.job_state_bytes - present : 0;
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t cache,
                            ParameterCacheBytesOf(job_, description));
  // The tables and the parameter cache of the replaced shape are freed.
  const auto own_memory = [this](const JobDescription& of) {
    return TableBytes(of) + DeviceUpdateBytes(job_, of) +
           scheduler::StepScheduler::WorkspaceBytes(of.layout,
                                                    job_.pool.participants());
  };
  const uint64_t tables = own_memory(description) + cache;
  uint64_t former = 0;
  if (job_.shape != nullptr) {
    const JobDescription& now = job_.shape->description;
    former = own_memory(now) + ParameterCacheBytesOf(job_, now).value_or(0);
  }
  request.table_bytes = tables > former ? tables - former : 0;
  request.uid = job_.options.uid;
  request.limits = job_.options.config.limits();
  request.quotas = job_.options.config.quotas();
  absl::Status admitted = Admit(request);
  if (admitted.ok()) admitted = AdmitFrames(files.frames);
  if (admitted.ok()) admitted = state_lock_.Admit(request.job_state_bytes);
  return Annotate(admitted, absl::StrCat("job \"", job_.options.name, "\""));
}

// Checks the node's budget, and the quotas of the job's owner, when the job
// needs more frames than it has.
absl::Status JobRegistrar::AdmitFrames(uint64_t bytes) const {
  const uint64_t present =
      job_.tier.has_value() ? job_.tier->frames().size() : 0;
  if (bytes <= present) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(CheckNodeBudget(
      job_.StateDir(), job_.options.config.nvme(), job_.options.name, bytes));
  return CheckFramesQuotas({&job_.options.config, job_.StateDir(),
                            job_.options.uid, job_.options.name},
                           bytes);
}

storage::HostTier::StepFileBytes JobRegistrar::StepFilesOf(
    const JobDescription& description) const {
  storage::HostTier::StepFileBytes bytes = {
      .undo =
          scheduler::StepScheduler::WorkerUndoBytes(job_.pool.participants()),
      .redo = scheduler::StepScheduler::RedoBytes(description.layout,
                                                  job_.pool.participants()),
      .speculation = SpeculationBytes(description),
      .gradient_log =
          GradientLogBytes(description, job_.devices.devices().size())};
  if (!UsesDisk(description.storage)) return bytes;
  const storage::SwapSizes sizes = SwapSizesOf(job_, description);
  bytes.frames = FrameBytesOf(description.storage, sizes);
  bytes.frame_table = sizes.table;
  return bytes;
}

absl::Status JobRegistrar::Create(const RegisterSpec& spec,
                                  JobDescription description) {
  const v1::StorageSettings asked = description.storage;
  OPTSTATE_RETURN_IF_ERROR(CheckStorage(asked, job_.options.config));
  if (description.ephemeral && IsDurable(asked)) {
    return absl::InvalidArgumentError(
        "a durability is for a job with a name: this one is private, and ends "
        "with its last session (job=None, or ephemeral)");
  }
  OPTSTATE_RETURN_IF_ERROR(CheckDeviceUpdates(description, &job_));
  // Measuring takes seconds, which other jobs need not wait for.
  const DiskRates rates = RatesFor(asked, &job_);
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                            AdmissionLock::Take(job_.StateDir()));
  OPTSTATE_RETURN_IF_ERROR(PlaceJob(
      job_, rates,
      [this](const JobDescription& what) { return AdmitShape(what); },
      &description));
  // A job that exists has its files, whatever the limits are now.
  if (UsesDisk(description.storage)) {
    const storage::SwapSizes sizes = SwapSizesOf(job_, description);
    OPTSTATE_RETURN_IF_ERROR(CheckDirectoryLimits(
        job_.options.config.nvme(), job_.options.name, sizes.directories));
    OPTSTATE_RETURN_IF_ERROR(
        CheckDiskQuotas({&job_.options.config, job_.StateDir(),
                         job_.options.uid, job_.options.name},
                        sizes.directories));
    description.storage.set_directories(
        static_cast<uint32_t>(job_.options.config.nvme().directories_size()));
  }
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<JobShape> shape,
                            MakeShape(std::move(description)));
  const JobDescription& what = shape->description;
  OPTSTATE_ASSIGN_OR_RETURN(
      job_.tier, storage::HostTier::Create(job_.options.directory, what.layout,
                                           HostArraysOf(what),
                                           SerializeDescription(what)));
  absl::Status used = UseShape(std::move(shape));
  if (used.ok()) used = job_.device_failure;
  if (used.ok()) {
    StartScaling(/*former=*/std::nullopt, spec.loss_scaler_state);
    return used;
  }
  ReleaseDevices(&job_).IgnoreError();  // no step was taken
  job_.DropStore();
  if (UsesDisk(job_.shape->description.storage)) {
    RemoveDiskFolders(DiskDirectoriesOf(job_.options.config, job_.options.name),
                      job_.tier->control()->incarnation);
  }
  job_.shape.reset();
  job_.tier.reset();
  storage::HostTier::Remove(job_.options.directory).IgnoreError();
  return used;
}

absl::Status JobRegistrar::Reshape(JobDescription description) {
  if (job_.recovery.has_value()) return job_.StillRecovering();
  if (job_.IsUnfinished(job_.record().committed_step + 1)) return job_.failure;
  const bool extended = description.layout.hash() != job_.layout().hash();
  const std::optional<v1::LossScaler> scaler =
      job_.shape->description.loss_scaler;
  const bool scaler_changed = TextOf(description.loss_scaler) != TextOf(scaler);
  if (extended && !job_.failure.ok()) return job_.failure;
  job_.EndMove(
      "the job is registered with other settings; set directory_weights again");
  const uint32_t first_new = job_.parameter_count();
  if (extended) OPTSTATE_RETURN_IF_ERROR(SettleRecords(&job_));
  std::unique_ptr<Rearrangement> records;
  if (extended && UsesDisk(description.storage)) {
    OPTSTATE_ASSIGN_OR_RETURN(records, WriteRecordsAnew(description));
    description.storage = records->description().storage;
  }
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                            AdmissionLock::Take(job_.StateDir()));
  OPTSTATE_RETURN_IF_ERROR(AdmitShape(description));
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<JobShape> shape,
                            MakeShape(std::move(description)));
  const JobDescription& what = shape->description;
  // Runs change hands; no rank is attached that would miss its staged
  // gradients.
  for (uint32_t rank = 0; rank < kWorldSizeMax; ++rank) {
    job_.rank_mark(rank).step = 0;
    ranks_.losses().Forget(rank);
  }
  job_.scheduler->ForgetStaged();
  step_.open_step.DropAll();
  step_.micro_steps.DropAll();
  // The files change under the store, and the next workspace needs the memory
  // of this one. Records are settled.
  ReleaseDevices(&job_).IgnoreError();
  job_.scheduler.reset();
  job_.DropStore();
  // The record of a READY job asks for loads from its parameter count on, where
  // the new parameters begin: from here on the job is LOADING.
  absl::Status reshaped =
      job_.tier->Reshape(what.layout, HostArraysOf(what), StepFilesOf(what),
                         SerializeDescription(what));
  if (!reshaped.ok()) {
    records.reset();
    // The job is unchanged, but its arrays may lie elsewhere.
    const absl::Status as_before = MakeScheduler();
    return as_before.ok() ? reshaped : LoseShape(as_before);
  }
  if (records != nullptr) records->Adopt();
  const absl::Status used = UseShape(std::move(shape));
  if (scaler_changed) StartScaling(scaler, /*state=*/std::nullopt);
  if (extended) {
    storage::StepRecord next = job_.record();
    next.load_required_from = std::min(next.load_required_from, first_new);
    storage::PublishRecord(next, job_.tier->control());
  }
  return used.ok() ? used : LoseShape(used);
}

// Writes the records of a job on disk for a layout that extends its own. They
// are the job's with its next description.
absl::StatusOr<std::unique_ptr<Rearrangement>> JobRegistrar::WriteRecordsAnew(
    const JobDescription& next) {
  if (next.storage.placement() == v1::PLACEMENT_NVME) {
    const absl::Status holds = CheckBudgetHolds(
        next.storage.host_budget_bytes(), SwapSizesOf(job_, next));
    if (!holds.ok()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job \"", job_.options.name,
          "\" cannot be extended, because its records become larger: ",
          holds.message(), " (optctl set job ", job_.options.name,
          " host_budget=)"));
    }
  }
  std::unique_ptr<Rearrangement> records;
  {
    // Other jobs need not wait until the records are written.
    OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                              AdmissionLock::Take(job_.StateDir()));
    OPTSTATE_RETURN_IF_ERROR(AdmitShape(next));
    OPTSTATE_ASSIGN_OR_RETURN(records, Rearrangement::Prepare(&job_, next));
  }
  OPTSTATE_RETURN_IF_ERROR(records->WriteAnew());
  return records;
}

// Fails the job in this engine: its files are whole, but the engine lacks
// resources to work on them. No rank is attached, and the next engine may have
// more.
absl::Status JobRegistrar::LoseShape(const absl::Status& why) {
  job_.failure = Annotate(
      why, absl::StrCat("job \"", job_.options.name,
                        "\" cannot go on in this engine; try it again (optctl "
                        "recover ",
                        job_.options.name, ") when there is room"));
  spdlog::error("{}", job_.failure.ToString());
  // The next engine does what this cannot.
  ReleaseDevices(&job_).IgnoreError();
  job_.scheduler.reset();
  ranks_.Clear();
  step_.open_step = OpenStep();
  step_.micro_steps = MicroSteps();
  load_.round = LoadRound();
  load_.staged.Reset({});
  job_.DropStore();
  job_.shape.reset();
  job_.tier.reset();
  return job_.failure;
}

void JobRegistrar::StartScaling(
    const std::optional<v1::LossScaler>& former,
    const std::optional<v1::LossScalerState>& state) {
  storage::StepRecord next = job_.record();
  const auto& scaler = job_.shape->description.loss_scaler;
  if (!scaler.has_value()) {
    next.loss_scale = 0;  // new job: none loses its scaler
  } else if (state.has_value()) {
    ContinueLossScaler(*state, &next);
  } else if (!former.has_value()) {
    StartLossScaler(*scaler, &next);
  } else {
    ChangeLossScaler(*former, *scaler, &next);
  }
  storage::PublishRecord(next, job_.tier->control());
}

// Every rank registers anew after this, so none attaches with a gradient area
// of the former shape.
absl::Status JobRegistrar::UseShape(std::unique_ptr<JobShape> shape,
                                    const storage::DurableCommit* restored) {
  job_.scheduler.reset();  // refers to the former layout and arrays
  // References to the former shape are replaced below, or dropped by the
  // caller.
  const std::unique_ptr<JobShape> former =
      std::exchange(job_.shape, std::move(shape));
  ++job_.shape_number;
  OPTSTATE_RETURN_IF_ERROR(MakeScheduler(restored));
  const auto& partitions = job_.shape->partitions;
  ranks_.Reset(static_cast<uint32_t>(partitions.size()));
  job_.counts_before_pass.reserve(job_.parameter_count());
  decider_.Reset();
  speculator_.Reset();
  step_.open_step.Reset(&job_.layout(), partitions, job_.is_replicated());
  step_.micro_steps.Reset(
      &job_.layout(),
      job_.accumulates_together() ? job_.shape->description.world_size : 0);
  load_.round.Reset(&job_.layout(), partitions);
  return absl::OkStatus();
}

absl::Status JobRegistrar::MakeScheduler(
    const storage::DurableCommit* restored) {
  // The files may move. The next scheduler does what this cannot.
  ReleaseDevices(&job_).IgnoreError();
  OPTSTATE_RETURN_IF_ERROR(
      job_.tier->ReserveStepFiles(StepFilesOf(job_.shape->description)));
  job_.scheduler.reset();
  job_.DropStore();  // it has the same files as the next one
  OPTSTATE_ASSIGN_OR_RETURN(job_.store, MakeStore(&job_, restored));
  scheduler::StepScheduler::Options options;
  options.store = job_.store.get();
  options.grain_elements = job_.options.config.engine().subgroup_elements();
  options.recovery = job_.tier->recovery();
  options.control = job_.tier->control();
  options.undo = job_.tier->undo();
  options.speculation = job_.tier->speculation();
  options.redo = job_.tier->redo();
  options.gradient_log = job_.tier->gradient_log();
  options.pool = &job_.pool;
  options.observer = job_.options.observer;
  MakeExecutor(&job_);
  options.executor = job_.executor.get();
  OPTSTATE_ASSIGN_OR_RETURN(job_.scheduler,
                            scheduler::StepScheduler::Create(options));
  // The records have what a log had.
  storage::SetLag(storage::Lag::kNone, job_.tier->control());
  const absl::Status moved = job_.scheduler->MoveToNodes(job_.placement);
  if (!moved.ok()) {
    spdlog::warn(
        "state stays on the NUMA nodes where it is: job={} error=\"{}\"",
        job_.options.name, moved.ToString());
  }
  job_.scheduler->SetPartitions(job_.shape->partitions, job_.is_replicated());
  // A job that is there goes on without devices, and says so.
  ShareUpdates(job_.shape->description.storage, &job_).IgnoreError();
  // Pages are on their nodes before the others are brought in.
  return state_lock_.Lock();
}

}  // namespace optstate::session
