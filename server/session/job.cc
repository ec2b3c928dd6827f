#include "server/session/job.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/available_cores.h"
#include "server/session/job_facts.h"
#include "server/session/job_impl.h"
#include "spdlog/spdlog.h"

namespace optstate {
namespace {

int WorkersOf(const v1::EngineSettings& settings) {
  constexpr int kWorkersMax = 1024;
  return settings.workers() == 0 ? AvailableCores()
                                 : static_cast<int>(std::min<uint32_t>(
                                       settings.workers(), kWorkersMax));
}

Pinning PinningOf(const v1::EngineSettings& settings) {
  switch (settings.pinning()) {
    case v1::PINNING_NEVER:
      return Pinning::kNever;
    case v1::PINNING_ALWAYS:
      return Pinning::kAlways;
    default:
      return Pinning::kAuto;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Job>> Job::Open(Options options) {
  const std::string name = options.name;
  auto job = std::make_unique<JobImpl>(std::move(options));
  job->LogWorkers();
  OPTSTATE_RETURN_IF_ERROR(
      Annotate(job->Adopt(), absl::StrCat("job \"", name, "\"")));
  job->ForgetKept();
  return job;
}

JobImpl::JobImpl(Options options)
    : options_(std::move(options)),
      placement_(PlaceWorkersHere(WorkersOf(options_.config.engine()),
                                  PinningOf(options_.config.engine()))),
      pool_(WorkersOf(options_.config.engine()),
            /*spin=*/WorkersOf(options_.config.engine()) <= AvailableCores(),
            placement_) {}

void JobImpl::LogWorkers() const {
  spdlog::info("workers: job={} count={} {}", options_.name,
               pool_.participants(), placement_.description);
}

absl::Status JobImpl::Adopt() {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(DropHalfRestored());
  const absl::StatusOr<CheckedFile> file =
      HostTier::ReadDescription(options_.directory);
  if (absl::IsNotFound(file.status())) {
    DropGradientsOfAway();
    const absl::Status restored = RestoreFromDisk();
    return absl::IsNotFound(restored) ? absl::OkStatus() : restored;
  }
  OPTSTATE_RETURN_IF_ERROR(file.status());
  OPTSTATE_ASSIGN_OR_RETURN(JobDescription description,
                            ParseDescription(file->payload));
  OPTSTATE_RETURN_IF_ERROR(StepScheduler::CheckKernels(
      description.layout, description.accumulation()));
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Shape> shape,
                            MakeShape(std::move(description)));
  OPTSTATE_ASSIGN_OR_RETURN(
      tier_, HostTier::Open(options_.directory, shape->description.layout,
                            HostArraysOf(shape->description), *file));
  OPTSTATE_RETURN_IF_ERROR(tier_->ReserveUndo(0));
  OPTSTATE_RETURN_IF_ERROR(tier_->ReserveSpeculation(0));
  OPTSTATE_RETURN_IF_ERROR(tier_->ReserveRedo(0));
  OPTSTATE_RETURN_IF_ERROR(CheckStepFiles(shape->description));
  OPTSTATE_RETURN_IF_ERROR(UseShape(std::move(shape)));
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (AwaitedCount() == 0) ForgetLoss(rank);
  }
  had_session_ = AwaitedCount() > 0;
  failure_ = AdoptStep();
  if (failure_.ok()) failure_ = AdoptLoad();
  if (failure_.ok()) failure_ = AdoptCommit();
  if (!failure_.ok()) spdlog::error("{}", failure_.ToString());
  return absl::OkStatus();
}

v1::JobPhase JobImpl::phase() const {
  if (!failure_.ok()) return v1::JOB_PHASE_FAILED;
  if (shape_ == nullptr) return v1::JOB_PHASE_EMPTY;
  if (recovery_.has_value()) return v1::JOB_PHASE_RECOVERING;
  return HasWholeState() ? v1::JOB_PHASE_READY : v1::JOB_PHASE_LOADING;
}

StepOutcome JobImpl::LastOutcome() const {
  StepOutcome outcome = OutcomeOf(record());
  if (nvme_ != nullptr) outcome.durable_step = nvme_->durable_step();
  return outcome;
}

absl::Status JobImpl::CheckRegistered() const {
  if (shape_ != nullptr) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(failure_);
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", options_.name,
                   "\" has no layout yet: register "
                   "first"));
}

absl::StatusOr<const Layout*> JobImpl::layout() const {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  return &layout_of_job();
}

absl::StatusOr<const RankPartition*> JobImpl::partition(uint32_t rank) const {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  if (rank >= shape_->partitions.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rank, " of a world of ", shape_->partitions.size()));
  }
  return &shape_->partitions[rank];
}

absl::StatusOr<UniqueFd> JobImpl::OpenParameters() const {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  return tier_->OpenParameters();
}

absl::StatusOr<UniqueFd> JobImpl::OpenRunStamps() const {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  if (SpeculationBytes(shape_->description) != 0) return UniqueFd();
  return tier_->OpenRunStamps();
}

}  // namespace optstate
