#ifndef OPTSTATE_SERVER_SESSION_JOB_IMPL_H_
#define OPTSTATE_SERVER_SESSION_JOB_IMPL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/session/drain_gate.h"
#include "server/session/durability/job_durability.h"
#include "server/session/durability/record_scrubber.h"
#include "server/session/durability/record_verifier.h"
#include "server/session/job.h"
#include "server/session/job_context.h"
#include "server/session/job_describer.h"
#include "server/session/job_opener.h"
#include "server/session/job_registrar.h"
#include "server/session/live_settings.h"
#include "server/session/ranks/loss_notifier.h"
#include "server/session/ranks/rank_attachments.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/recovery/job_recovery.h"
#include "server/session/recovery/recovered_gradients.h"
#include "server/session/state_lock.h"
#include "server/session/steps/agreement.h"
#include "server/session/steps/micro_step_summer.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/staging_marks.h"
#include "server/session/steps/step_committer.h"
#include "server/session/steps/step_coordinator.h"
#include "server/session/steps/step_decider.h"
#include "server/session/steps/step_preparer.h"
#include "server/session/steps/step_stager.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_applier.h"
#include "server/session/transfer/load_log_room.h"
#include "server/session/transfer/load_rounds.h"
#include "server/session/transfer/load_state.h"
#include "server/session/transfer/state_loader.h"
#include "server/session/transfer/state_reader.h"

namespace optstate::session {

// Implements the Job of one engine: owns its rooms, takes the job's lock, and
// forwards each call to the room that answers it. The rooms are declared from
// the bottom up: each knows those above it in this list, see README.md.
// Size: one method for each call of Job; the work is in the rooms.
class JobImpl final : public Job {
 public:
  explicit JobImpl(Options options);
  ~JobImpl() override;

  // Adopts existing files of the directory. Called once, before other calls.
  absl::Status Adopt();
  // Closes the segments in Options::kept that no step needs.
  void ForgetKept() { job_.options.kept.clear(); }
  void LogWorkers() const;
  // Has the job's records verified from time to time, if the configuration says
  // so and names disks. Called once, after Adopt.
  void StartScrubs();

  absl::StatusOr<RegisterResult> Register(const RegisterSpec& spec) override;
  absl::StatusOr<const Layout*> layout() const override;
  absl::StatusOr<const RankPartition*> partition(uint32_t rank) const override;
  absl::StatusOr<UniqueFd> OpenParameters() const override;
  absl::StatusOr<UniqueFd> OpenRunStamps() const override;
  absl::StatusOr<DeviceParameters> ShareParameters(
      absl::string_view device) override;
  absl::Status ShareGradients(uint32_t rank, absl::string_view device,
                              DeviceGradients gradients) override;

  absl::StatusOr<AttachResult> Attach(const AttachSpec& spec) override;
  void Detach(uint32_t rank) override;
  void Leave(uint32_t rank) override;
  void NoteFarewell(uint32_t rank, uint64_t client_instance) override;
  std::vector<FormerRank> Awaited() const override;
  void GiveUp(const FormerRank& rank) override;

  absl::Status Push(uint32_t rank, uint64_t step, uint32_t micro_step,
                    uint32_t first_parameter,
                    uint32_t parameter_count) override;
  bool WorkAhead(uint32_t rank) override;
  void EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                    uint32_t micro_step) override;
  void Commit(uint32_t rank, uint64_t request_id,
              const CommitSpec& spec) override;
  absl::Status Abort(uint32_t rank, uint64_t step) override;
  absl::StatusOr<JobPosition> Position() override;
  void Decide(uint32_t rank, uint64_t request_id,
              const StepVerdict& verdict) override;
  absl::StatusOr<StepOutcome> DecideUnattached(
      const StepVerdict& verdict) override;
  std::string StagingPath(uint32_t rank,
                          uint64_t client_instance) const override;
  absl::StatusOr<storage::StateFile> MakeStaging(uint32_t rank,
                                                 uint64_t client_instance,
                                                 uint64_t gradient_area_bytes,
                                                 bool* present) override;

  absl::Status BeginLoad(uint32_t rank) override;
  absl::Status Load(uint32_t rank, v1::StateArray array, uint32_t parameter,
                    uint64_t begin, uint64_t numel, DType dtype,
                    absl::Span<const std::byte> data) override;
  void FinishLoad(uint32_t rank, uint64_t request_id,
                  const LoadEnd& end) override;
  absl::StatusOr<uint64_t> Fetch(v1::StateArray array, uint32_t parameter,
                                 uint64_t begin, uint64_t numel,
                                 absl::Span<std::byte> out) override;
  absl::Status HintParameters(ParameterHint hint, uint32_t first,
                              uint32_t count) override;
  absl::Status ReadParameters(uint64_t offset_bytes,
                              absl::Span<std::byte> out) override;

  void BeginDrain() override;
  void Resume() override;
  absl::Status AwaitDrained(absl::Time deadline) override;
  absl::Status AwaitResumed(absl::Time deadline) override;
  void SetLimits(const v1::Limits& limits) override;
  void SetQuotas(
      const google::protobuf::RepeatedPtrField<v1::Quota>& quotas) override;
  absl::Status Pause(absl::Time deadline, absl::Duration lease) override;
  bool paused() const override;
  void Stop() override;
  absl::Status Verify(
      absl::FunctionRef<bool(const v1::VerifyJobProgress&)> progress) override;

  absl::Status Trace(
      const v1::TraceJobRequest& request, absl::Time deadline,
      absl::FunctionRef<bool(const v1::TraceChunk&)> pass) override;

  absl::StatusOr<v1::SetJobReply> Set(
      const v1::SetJobRequest& request) override;

  bool finished() const override;
  v1::Job Describe() const override;
  absl::StatusOr<v1::ListParametersReply> ListParameters(
      const v1::ListParametersRequest& request) const override;

 private:
  absl::StatusOr<std::shared_ptr<Verification>> BeginScrub();

  // The lock of calls that need an idle job is taken in a const call too.
  mutable JobContext job_;
  RankRoster ranks_ ABSL_GUARDED_BY(job_.lock.mu);
  StepState step_ ABSL_GUARDED_BY(job_.lock.mu);
  LoadState load_ ABSL_GUARDED_BY(job_.lock.mu);
  JobDurability durability_ ABSL_GUARDED_BY(job_.lock.mu);
  StateLock state_lock_ ABSL_GUARDED_BY(job_.lock.mu);
  StagingMarks marks_ ABSL_GUARDED_BY(job_.lock.mu);
  MicroStepSummer sums_ ABSL_GUARDED_BY(job_.lock.mu);
  StepDecider decider_ ABSL_GUARDED_BY(job_.lock.mu);
  Speculator speculator_ ABSL_GUARDED_BY(job_.lock.mu);
  StepStager stager_ ABSL_GUARDED_BY(job_.lock.mu);
  StepCommitter committer_ ABSL_GUARDED_BY(job_.lock.mu);
  LossNotifier losses_ ABSL_GUARDED_BY(job_.lock.mu);
  DrainGate gate_ ABSL_GUARDED_BY(job_.lock.mu);
  LoadLogRoom log_ ABSL_GUARDED_BY(job_.lock.mu);
  LoadRounds rounds_ ABSL_GUARDED_BY(job_.lock.mu);
  LoadApplier applier_ ABSL_GUARDED_BY(job_.lock.mu);
  RecoveredGradients gradients_ ABSL_GUARDED_BY(job_.lock.mu);
  JobRecovery recovery_ ABSL_GUARDED_BY(job_.lock.mu);
  StepPreparer preparer_ ABSL_GUARDED_BY(job_.lock.mu);
  RankAttachments attachments_ ABSL_GUARDED_BY(job_.lock.mu);
  Agreement agreement_ ABSL_GUARDED_BY(job_.lock.mu);
  StepCoordinator coordinator_ ABSL_GUARDED_BY(job_.lock.mu);
  StateLoader loader_ ABSL_GUARDED_BY(job_.lock.mu);
  StateReader reader_ ABSL_GUARDED_BY(job_.lock.mu);
  JobRegistrar registrar_ ABSL_GUARDED_BY(job_.lock.mu);
  JobOpener opener_ ABSL_GUARDED_BY(job_.lock.mu);
  LiveSettings settings_ ABSL_GUARDED_BY(job_.lock.mu);
  JobDescriber describer_ ABSL_GUARDED_BY(job_.lock.mu);
  RecordScrubber scrubber_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_IMPL_H_
