#include "server/session/job_impl.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/status_macros.h"
#include "server/session/admission.h"
#include "server/session/devices/device_updates.h"
#include "server/session/job_lock.h"
#include "server/session/job_trace.h"
#include "server/session/recovery/staging_file.h"
#include "spdlog/spdlog.h"

namespace optstate::session {

JobImpl::JobImpl(Options options)
    : job_(std::move(options)),
      ranks_(&job_),
      step_(&job_),
      durability_(&job_),
      state_lock_(&job_),
      marks_(&job_, &ranks_, &step_),
      sums_(&job_, &ranks_, &step_, &marks_),
      decider_(&job_, &ranks_, &step_),
      speculator_(&job_, &ranks_, &step_, &decider_),
      stager_({.job = &job_,
               .ranks = &ranks_,
               .step = &step_,
               .marks = &marks_,
               .sums = &sums_,
               .speculator = &speculator_}),
      committer_({.job = &job_,
                  .ranks = &ranks_,
                  .step = &step_,
                  .decider = &decider_,
                  .durability = &durability_}),
      losses_({.job = &job_,
               .ranks = &ranks_,
               .step = &step_,
               .sums = &sums_,
               .stager = &stager_}),
      gate_(&job_, &ranks_, &step_, &load_),
      log_(&job_, &load_),
      rounds_(&job_, &ranks_, &load_, &log_),
      applier_({.job = &job_,
                .load = &load_,
                .log = &log_,
                .rounds = &rounds_,
                .durability = &durability_}),
      gradients_(&job_, &ranks_),
      recovery_({.job = &job_,
                 .ranks = &ranks_,
                 .step = &step_,
                 .sums = &sums_,
                 .stager = &stager_,
                 .speculator = &speculator_,
                 .committer = &committer_,
                 .gradients = &gradients_,
                 .applier = &applier_}),
      preparer_({.job = &job_,
                 .ranks = &ranks_,
                 .step = &step_,
                 .decider = &decider_,
                 .committer = &committer_,
                 .recovery = &recovery_}),
      attachments_({.job = &job_,
                    .ranks = &ranks_,
                    .step = &step_,
                    .stager = &stager_,
                    .losses = &losses_,
                    .gradients = &gradients_,
                    .recovery = &recovery_,
                    .rounds = &rounds_,
                    .gate = &gate_}),
      agreement_({.job = &job_,
                  .ranks = &ranks_,
                  .step = &step_,
                  .sums = &sums_,
                  .stager = &stager_,
                  .load = &load_,
                  .rounds = &rounds_}),
      coordinator_({.job = &job_,
                    .ranks = &ranks_,
                    .step = &step_,
                    .marks = &marks_,
                    .sums = &sums_,
                    .stager = &stager_,
                    .decider = &decider_,
                    .speculator = &speculator_,
                    .committer = &committer_,
                    .losses = &losses_,
                    .agreement = &agreement_,
                    .recovery = &recovery_,
                    .preparer = &preparer_,
                    .load = &load_,
                    .rounds = &rounds_,
                    .gate = &gate_}),
      loader_({.job = &job_,
               .ranks = &ranks_,
               .step = &step_,
               .stager = &stager_,
               .agreement = &agreement_,
               .load = &load_,
               .log = &log_,
               .rounds = &rounds_,
               .applier = &applier_,
               .gate = &gate_}),
      reader_(&job_, &decider_, &speculator_),
      registrar_({.job = &job_,
                  .ranks = &ranks_,
                  .step = &step_,
                  .decider = &decider_,
                  .speculator = &speculator_,
                  .load = &load_,
                  .state_lock = &state_lock_}),
      opener_({.job = &job_,
               .ranks = &ranks_,
               .durability = &durability_,
               .gradients = &gradients_,
               .recovery = &recovery_,
               .applier = &applier_,
               .registrar = &registrar_}),
      settings_({.job = &job_,
                 .durability = &durability_,
                 .registrar = &registrar_,
                 .state_lock = &state_lock_}),
      describer_({.job = &job_,
                  .ranks = &ranks_,
                  .step = &step_,
                  .load = &load_,
                  .speculator = &speculator_,
                  .committer = &committer_,
                  .durability = &durability_,
                  .state_lock = &state_lock_}),
      scrubber_({.interval = absl::Seconds(
                     job_.options.config.nvme().scrub_interval_s()),
                 .clock = job_.options.clock,
                 .begin = [this] { return BeginScrub(); }},
                &job_.verifier) {}

JobImpl::~JobImpl() {
  scrubber_.Stop();
  JobCall lock(&job_.lock);
  durability_.CommitFinally(load_.round.active());
}

absl::Status JobImpl::Adopt() {
  JobCall lock(&job_.lock);
  absl::Status adopted = opener_.Adopt();
  // The records may be of half a step, so the end of this object must not make
  // them durable.
  if (!adopted.ok()) job_.failure = adopted;
  return adopted;
}

void JobImpl::LogWorkers() const {
  spdlog::info("workers: job={} count={} {}", job_.options.name,
               job_.pool.participants(), job_.placement.description);
}

void JobImpl::StartScrubs() {
  const v1::NvmeSettings& nvme = job_.options.config.nvme();
  if (nvme.scrub_interval_s() == 0 || nvme.directories().empty()) return;
  const absl::Status started = scrubber_.Start();
  if (!started.ok()) spdlog::warn("no scrubs: {}", started.ToString());
}

absl::StatusOr<std::shared_ptr<Verification>> JobImpl::BeginScrub() {
  absl::MutexLock lock(&job_.lock.mu);
  OPTSTATE_RETURN_IF_ERROR(gate_.CheckTakesOperations());
  return job_.BeginScrub();
}

absl::StatusOr<RegisterResult> JobImpl::Register(const RegisterSpec& spec) {
  OPTSTATE_ASSIGN_OR_RETURN(JobDescription description, DescriptionOf(spec));
  JobCall lock(&job_.lock);
  return registrar_.Register(spec, std::move(description));
}

absl::StatusOr<const Layout*> JobImpl::layout() const {
  absl::MutexLock lock(&job_.lock.mu);
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  return &job_.layout();
}

absl::StatusOr<const RankPartition*> JobImpl::partition(uint32_t rank) const {
  absl::MutexLock lock(&job_.lock.mu);
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  if (rank >= job_.shape->partitions.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rank, " of a world of ", job_.shape->partitions.size()));
  }
  return &job_.shape->partitions[rank];
}

absl::StatusOr<UniqueFd> JobImpl::OpenParameters() const {
  absl::MutexLock lock(&job_.lock.mu);
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job_.CheckHasParameterArea());
  return job_.tier->OpenParameters();
}

absl::StatusOr<UniqueFd> JobImpl::OpenRunStamps() const {
  absl::MutexLock lock(&job_.lock.mu);
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  if (job_.speculates()) return UniqueFd();
  return job_.tier->OpenRunStamps();
}

absl::StatusOr<DeviceParameters> JobImpl::ShareParameters(
    absl::string_view device) {
  JobCall lock(&job_.lock);
  OPTSTATE_RETURN_IF_ERROR(CheckMayShare(job_));
  OPTSTATE_RETURN_IF_ERROR(job_.CheckHasParameterArea());
  return session::ShareParameters(device, &job_);
}

absl::Status JobImpl::ShareGradients(uint32_t rank, absl::string_view device,
                                     DeviceGradients gradients) {
  JobCall lock(&job_.lock);
  OPTSTATE_RETURN_IF_ERROR(CheckMayShare(job_));
  OPTSTATE_RETURN_IF_ERROR(ranks_.CheckAttached(rank));
  const std::byte* const area = ranks_.session(rank).spec.gradient_area;
  return session::ShareGradients({rank, area, device}, std::move(gradients),
                                 &job_);
}

absl::StatusOr<AttachResult> JobImpl::Attach(const AttachSpec& spec) {
  JobCall lock(&job_.lock);
  return attachments_.Attach(spec);
}

void JobImpl::Detach(uint32_t rank) {
  JobCall lock(&job_.lock);
  attachments_.DetachLocked(rank, /*for_good=*/false);
}

void JobImpl::Leave(uint32_t rank) {
  JobCall lock(&job_.lock);
  attachments_.DetachLocked(rank, /*for_good=*/true);
}

void JobImpl::NoteFarewell(uint32_t rank, uint64_t client_instance) {
  JobCall lock(&job_.lock);
  attachments_.NoteFarewell(rank, client_instance);
}

std::vector<FormerRank> JobImpl::Awaited() const {
  absl::MutexLock lock(&job_.lock.mu);
  return ranks_.Awaited();
}

void JobImpl::GiveUp(const FormerRank& former) {
  absl::MutexLock lock(&job_.lock.mu);
  job_.lock.CallWhenIdle([this, former] {
    attachments_.GiveUpAbsent(former.rank, former.client_instance);
  });
}

absl::Status JobImpl::Push(uint32_t rank, uint64_t step, uint32_t micro_step,
                           uint32_t first_parameter, uint32_t parameter_count) {
  // The wait for the lock is a part of the push.
  const int64_t begin_ns = job_.step_spans.Begin();
  JobCall lock(&job_.lock);
  OPTSTATE_RETURN_IF_ERROR(coordinator_.Push(rank, step, micro_step,
                                             first_parameter, parameter_count));
  job_.TracePush(begin_ns, rank, first_parameter, parameter_count);
  return absl::OkStatus();
}

bool JobImpl::WorkAhead(uint32_t rank) {
  JobCall lock(&job_.lock);
  return coordinator_.WorkAhead(rank);
}

void JobImpl::EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                           uint32_t micro_step) {
  JobCall lock(&job_.lock);
  coordinator_.EndMicroStep(rank, request_id, step, micro_step);
}

void JobImpl::Commit(uint32_t rank, uint64_t request_id,
                     const CommitSpec& spec) {
  JobCall lock(&job_.lock);
  coordinator_.Commit(rank, request_id, spec);
}

absl::Status JobImpl::Abort(uint32_t rank, uint64_t step) {
  JobCall lock(&job_.lock);
  return coordinator_.Abort(rank, step);
}

absl::StatusOr<JobPosition> JobImpl::Position() {
  JobCall lock(&job_.lock);
  return preparer_.Position();
}

void JobImpl::Decide(uint32_t rank, uint64_t request_id,
                     const StepVerdict& verdict) {
  JobCall lock(&job_.lock);
  gate_.AwaitPauseEnd();
  preparer_.Decide(rank, request_id, verdict);
}

absl::StatusOr<StepOutcome> JobImpl::DecideUnattached(
    const StepVerdict& verdict) {
  JobCall lock(&job_.lock);
  gate_.AwaitPauseEnd();
  return preparer_.DecideUnattached(verdict);
}

std::string JobImpl::StagingPath(uint32_t rank,
                                 uint64_t client_instance) const {
  return job_.StagingPath(rank, client_instance);
}

// The job's lock is not held while memory is made, for which other ranks need
// not wait. A file that is there was admitted when it was made.
absl::StatusOr<storage::StateFile> JobImpl::MakeStaging(
    uint32_t rank, uint64_t client_instance, uint64_t gradient_area_bytes,
    bool* present) {
  const std::string path = job_.StagingPath(rank, client_instance);
  absl::StatusOr<storage::StateFile> there =
      OpenStagingFile(path, gradient_area_bytes);
  *present = there.ok();
  if (!absl::IsDataLoss(there.status())) return there;
  AdmissionRequest request;
  request.directory = job_.options.directory;
  request.state_dir = job_.StateDir();
  request.new_state_bytes = gradient_area_bytes;
  request.uid = job_.options.uid;
  {
    absl::MutexLock lock(&job_.lock.mu);
    request.limits = job_.options.config.limits();
    request.quotas = job_.options.config.quotas();
  }
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock admission,
                            AdmissionLock::Take(request.state_dir));
  OPTSTATE_RETURN_IF_ERROR(Admit(request));
  return MakeStagingFile(path, gradient_area_bytes, present);
}

absl::Status JobImpl::BeginLoad(uint32_t rank) {
  JobCall lock(&job_.lock);
  return loader_.BeginLoad(rank);
}

absl::Status JobImpl::Load(uint32_t rank, v1::StateArray array,
                           uint32_t parameter, uint64_t begin, uint64_t numel,
                           DType dtype, absl::Span<const std::byte> data) {
  JobCall lock(&job_.lock);
  return loader_.Load(rank, array, parameter, begin, numel, dtype, data);
}

void JobImpl::FinishLoad(uint32_t rank, uint64_t request_id,
                         const LoadEnd& end) {
  JobCall lock(&job_.lock);
  loader_.FinishLoad(rank, request_id, end);
}

absl::StatusOr<uint64_t> JobImpl::Fetch(v1::StateArray array,
                                        uint32_t parameter, uint64_t begin,
                                        uint64_t numel,
                                        absl::Span<std::byte> out) {
  JobCall lock(&job_.lock);
  return reader_.Fetch(array, parameter, begin, numel, out);
}

absl::Status JobImpl::HintParameters(ParameterHint hint, uint32_t first,
                                     uint32_t count) {
  JobCall lock(&job_.lock);
  return reader_.Hint(hint, first, count);
}

absl::Status JobImpl::ReadParameters(uint64_t offset_bytes,
                                     absl::Span<std::byte> out) {
  JobCall lock(&job_.lock);
  return reader_.ReadParameters(offset_bytes, out);
}

void JobImpl::BeginDrain() {
  {
    absl::MutexLock lock(&job_.lock.mu);
    gate_.BeginDrain();
    job_.CancelMove("the job drains");
  }
  job_.verifier.Cancel("the job drains");
}

void JobImpl::Resume() {
  {
    absl::MutexLock lock(&job_.lock.mu);
    gate_.Resume();
  }
  scrubber_.Wake();
}

absl::Status JobImpl::AwaitDrained(absl::Time deadline) {
  absl::MutexLock lock(&job_.lock.mu);
  return gate_.AwaitDrained(deadline);
}

absl::Status JobImpl::AwaitResumed(absl::Time deadline) {
  absl::MutexLock lock(&job_.lock.mu);
  return gate_.AwaitResumed(deadline);
}

void JobImpl::SetLimits(const v1::Limits& limits) {
  absl::MutexLock lock(&job_.lock.mu);
  *job_.options.config.mutable_limits() = limits;
}

void JobImpl::SetQuotas(
    const google::protobuf::RepeatedPtrField<v1::Quota>& quotas) {
  absl::MutexLock lock(&job_.lock.mu);
  *job_.options.config.mutable_quotas() = quotas;
}

absl::Status JobImpl::Pause(absl::Time deadline, absl::Duration lease) {
  {
    absl::MutexLock lock(&job_.lock.mu);
    OPTSTATE_RETURN_IF_ERROR(gate_.Pause(deadline, lease));
    job_.CancelMove("the job pauses, for another engine");
  }
  job_.verifier.Cancel("the job pauses, for another engine");
  return absl::OkStatus();
}

bool JobImpl::paused() const {
  absl::MutexLock lock(&job_.lock.mu);
  return gate_.paused();
}

void JobImpl::Stop() {
  JobCall lock(&job_.lock);
  gate_.Stop();
  job_.EndMove("the engine ends");
  job_.verifier.Cancel("the engine ends");
  // The next engine may be of an older build, which could not read records that
  // lag behind devices. A step that is being finished keeps what it has.
  if (job_.failure.ok() && !job_.recovery.has_value()) {
    // The next engine brings the others up to date. No commit may have them.
    job_.failure = ReleaseDevices(&job_);
  }
  durability_.CommitFinally(load_.round.active());
}

absl::Status JobImpl::Verify(
    absl::FunctionRef<bool(const v1::VerifyJobProgress&)> progress) {
  std::shared_ptr<Verification> verification;
  {
    // Ends before the wait, at whose end the job may be gone.
    const RecordVerifier::OperatorTurn turn(&job_.verifier);
    absl::MutexLock lock(&job_.lock.mu);
    OPTSTATE_RETURN_IF_ERROR(gate_.CheckTakesOperations());
    OPTSTATE_ASSIGN_OR_RETURN(verification, job_.BeginVerification());
  }
  return verification->Await(progress);
}

absl::Status JobImpl::Trace(
    const v1::TraceJobRequest& request, absl::Time deadline,
    absl::FunctionRef<bool(const v1::TraceChunk&)> pass) {
  OPTSTATE_ASSIGN_OR_RETURN(const uint32_t steps, TracedSteps(request));
  {
    const absl::MutexLock lock(&job_.lock.mu);
    OPTSTATE_RETURN_IF_ERROR(gate_.CheckTakesOperations());
    OPTSTATE_RETURN_IF_ERROR(CheckMayTrace(job_));
  }
  return TraceSteps(&job_, steps, deadline, pass);
}

absl::StatusOr<v1::SetJobReply> JobImpl::Set(const v1::SetJobRequest& request) {
  JobCall lock(&job_.lock);
  OPTSTATE_RETURN_IF_ERROR(gate_.CheckTakesOperations());
  return settings_.Set(request);
}

bool JobImpl::finished() const {
  absl::MutexLock lock(&job_.lock.mu);
  if (job_.shape == nullptr) return ranks_.had_session() && job_.failure.ok();
  return job_.shape->description.ephemeral && ranks_.had_session() &&
         ranks_.AttachedCount() == 0 && ranks_.AwaitedCount() == 0;
}

v1::Job JobImpl::Describe() const {
  absl::MutexLock lock(&job_.lock.mu);
  return describer_.Describe();
}

absl::StatusOr<v1::ListParametersReply> JobImpl::ListParameters(
    const v1::ListParametersRequest& request) const {
  absl::MutexLock lock(&job_.lock.mu);
  return describer_.ListParameters(request);
}

}  // namespace optstate::session
