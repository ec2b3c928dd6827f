#ifndef OPTSTATE_SERVER_SESSION_JOB_IMPL_H_
#define OPTSTATE_SERVER_SESSION_JOB_IMPL_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "proto/shm/sealed_segment.h"
#include "server/scheduler/step_scheduler.h"
#include "server/scheduler/worker_placement.h"
#include "server/scheduler/worker_pool.h"
#include "server/session/element_access.h"
#include "server/session/job.h"
#include "server/session/job_description.h"
#include "server/session/load_round.h"
#include "server/session/micro_steps.h"
#include "server/session/open_step.h"
#include "server/session/staged_load.h"
#include "server/session/step_timer.h"
#include "storage/format/load_log.h"
#include "storage/format/step_intent.h"
#include "storage/host_tier.h"
#include "storage/state_file.h"
#include "storage/state_store.h"
#include "storage/tiers/nvme/nvme_store.h"

namespace optstate {

// Implements the Job of one engine. By file: job.cc opens the job and describes
// layout and phase, job_register.cc creates and reshapes, job_ranks.cc attaches
// and drains, job_steps.cc takes steps, job_micro_steps.cc accumulates what
// ranks push together, job_speculation.cc begins steps early, job_recovery.cc
// finishes the step of an engine that died, job_load.cc takes what ranks load,
// job_load_apply.cc makes the load the job's state, job_agreement.cc finds that
// some ranks load while others step, job_fetch.cc reads, job_describe.cc
// reports to operators, job_durable.cc keeps records on disk.
class JobImpl final : public Job {
 public:
  explicit JobImpl(Options options);

  // Adopts existing files of the directory. Called once, before other calls.
  absl::Status Adopt();
  // Closes the segments in Options::kept that no step needs.
  void ForgetKept() { options_.kept.clear(); }
  ~JobImpl() override { EndDurably(); }
  void LogWorkers() const;

  absl::StatusOr<RegisterResult> Register(const RegisterSpec& spec) override;
  absl::StatusOr<const Layout*> layout() const override;
  absl::StatusOr<const RankPartition*> partition(uint32_t rank) const override;
  absl::StatusOr<UniqueFd> OpenParameters() const override;
  absl::StatusOr<UniqueFd> OpenRunStamps() const override;

  absl::StatusOr<AttachResult> Attach(const AttachSpec& spec) override;
  void Detach(uint32_t rank) override;
  void Leave(uint32_t rank) override;

  absl::Status Push(uint32_t rank, uint64_t step, uint32_t micro_step,
                    uint32_t first_parameter,
                    uint32_t parameter_count) override;
  void EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                    uint32_t micro_step) override;
  void Commit(uint32_t rank, uint64_t request_id,
              const CommitSpec& spec) override;
  absl::Status Abort(uint32_t rank, uint64_t step) override;
  std::string StagingPath(uint32_t rank,
                          uint64_t client_instance) const override;

  absl::Status BeginLoad(uint32_t rank) override;
  absl::Status Load(uint32_t rank, v1::StateArray array, uint32_t parameter,
                    uint64_t begin, uint64_t numel, DType dtype,
                    absl::Span<const std::byte> data) override;
  void FinishLoad(uint32_t rank, uint64_t request_id,
                  uint64_t content_digest) override;
  absl::StatusOr<uint64_t> Fetch(v1::StateArray array, uint32_t parameter,
                                 uint64_t begin, uint64_t numel,
                                 absl::Span<std::byte> out) override;
  absl::Status ReadParameters(uint64_t offset_bytes,
                              absl::Span<std::byte> out) override;

  void BeginDrain() override;
  void Resume() override;
  absl::Status AwaitDrained(absl::Time deadline) override;
  absl::Status AwaitResumed(absl::Time deadline) override;
  void SetLimits(const v1::Limits& limits) override;
  absl::Status Rest(absl::Time deadline, absl::Duration lease) override;
  bool resting() const override;
  void StandStill() override;
  std::vector<FormerRank> Awaited() const override;
  void TakeFarewell(uint32_t rank, uint64_t client_instance) override;
  void GiveUp(const FormerRank& rank) override;
  bool finished() const override;
  v1::Job Describe() const override;
  absl::StatusOr<v1::ListParametersReply> ListParameters(
      const v1::ListParametersRequest& request) const override;

 private:
  struct RankSession {
    bool attached = false;
    AttachSpec spec;
    absl::Time attached_at;
    uint64_t committed_step = 0;  // the last it participated in
    // The step that was to be finished when the rank attached; 0: none.
    uint64_t recovering_step = 0;
    // The EndMicroStep that is not answered yet.
    std::optional<uint64_t> ending;
    // The rank whose drop discarded sums in which this rank participated, while
    // this rank has not dropped its own part yet.
    std::optional<uint32_t> sums_dropped_by;
    bool sums_dropped_by_loss = false;  // false: that rank aborted
    // The rank does not return when its connection ends.
    bool has_said_farewell = false;
    // For a lost rank: this engine has aborted some rank because of the loss.
    bool loss_told = false;
    // The rank was aborted for a loss, and has made no call since.
    bool was_told_of_loss = false;
    // Not OK: the answer to its next commit, end of a micro-step or load.
    absl::Status disagreement;
  };

  // A description and what follows from it; replaced as a whole.
  struct Shape {
    JobDescription description;
    std::string text;                       // of the description, serialized
    std::vector<RankPartition> partitions;  // by rank
  };

  // The decision about a step.
  struct Decision {
    StepOutcome outcome;
    bool clipped = false;  // some group's factor is not 1 / grad_scale
  };

  // A step in which a former engine died and that is not finished yet.
  struct Recovery {
    StepRecord record;  // to be published
    std::vector<StepIntentGroup> groups;
    std::vector<uint8_t> updated;
    std::vector<uint64_t> pushed_by;
    double gradient_limit;
    // Memory of the gradients of ranks that need not be attached.
    std::vector<shm::PeerSegment> kept;
    std::vector<StateFile> staged;
  };

  // job.cc
  const Layout& layout_of_job() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return shape_->description.layout;
  }
  bool is_replicated() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return shape_->description.partition == PartitionMode::kReplicated;
  }
  // Returns whether a run's accumulator has gradients of several ranks.
  bool accumulates_together() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return is_replicated() && shape_->description.accumulate;
  }
  uint32_t parameter_count() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return static_cast<uint32_t>(layout_of_job().parameters().size());
  }
  const StepRecord& record() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return CurrentRecord(*tier_->control());
  }
  v1::JobPhase phase() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  StepOutcome LastOutcome() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckRegistered() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  RankMark& rank_mark(uint32_t rank) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return tier_->recovery().rank_marks[rank];
  }
  // Returns the mark whose step and epoch say which marks of the rank's runs
  // count.
  RankMark& staging_mark(uint32_t rank) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return rank_mark(accumulates_together() ? 0 : rank);
  }
  void StartScaling(const std::optional<v1::LossScaler>& former,
                    const std::optional<v1::LossScalerState>& state)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // job_register.cc
  static absl::StatusOr<std::unique_ptr<Shape>> MakeShape(
      JobDescription description);
  absl::Status Create(const RegisterSpec& spec, JobDescription description)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Reshape(JobDescription description)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RegisterAgain(const RegisterSpec& spec,
                             JobDescription description)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckScalerStays(const JobDescription& description) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status AdmitShape(const JobDescription& description) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  uint64_t SpeculationBytes(const JobDescription& description) const;
  HostTier::StepFileBytes StepFilesOf(const JobDescription& description) const;
  static HostArrays HostArraysOf(const JobDescription& description);
  absl::Status LoseShape(const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `restored`: the commit from which the job is made anew, or null.
  absl::Status UseShape(std::unique_ptr<Shape> shape,
                        const DurableCommit* restored = nullptr)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status MakeScheduler(const DurableCommit* restored = nullptr)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::string StateDir() const;

  // job_ranks.cc
  absl::Status CheckAttached(uint32_t rank) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckMayAttach(const AttachSpec& spec) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  uint32_t AttachedCount() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  uint32_t AwaitedCount() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool IsAwaited(uint32_t rank) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Returns whether the rank is away within a step, and its process, which is
  // not `by`, runs and is to return.
  bool IsHeld(uint32_t rank, const RankProcess& by) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckNoneHeld(const RankProcess& by) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status HeldBy(uint32_t rank) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void MarkAttached(const AttachSpec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Part(uint32_t rank, bool for_good) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void GiveUpAway(uint32_t rank, uint64_t client_instance)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `in_step`: the rank is lost in an open step.
  void BeginLoss(uint32_t rank, bool in_step)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndLoss(uint32_t rank, bool in_step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsDrained() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool NoOpenStep() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool NothingUnderWay() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool IsAwake() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return !resting_ || options_.clock() >= rest_end_;
  }
  void SitOutRest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // job_steps.cc
  absl::Status CheckStep(uint32_t rank, uint64_t step) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool IsOfRecoveredStep(uint32_t rank, uint64_t step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckParameterRange(uint64_t first, uint64_t count) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckCommit(uint32_t rank, const CommitSpec& spec,
                           bool* repeated) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void CloseStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckCommitsEqual() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void StagePartly() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Decision Decide(uint64_t step, absl::Span<const uint8_t> updated)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  double NormOf(double norm_type, absl::Span<const uint8_t> updated,
                double sum_of_squares) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  double NormOfGroup(size_t group, const CommitSpec& spec,
                     absl::Span<const uint8_t> updated, double sum_of_squares)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NormsOfGroups(const CommitSpec& spec, absl::Span<const uint8_t> updated)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FillIntentGroups(const CommitSpec& spec, double coefficient)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void KeepGradientNorms(uint64_t step, absl::Span<const uint8_t> updated)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeStep(const Decision& decision,
                        absl::Span<const uint8_t> updated)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MarkStep(const StepRecord& next, double gradient_limit,
                absl::Span<const uint8_t> updated)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ApplyStep(const StepScheduler::Update& update, StepRecord next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Record(const StepRecord& next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AnswerCommits(const absl::Status& status, const StepOutcome& outcome)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t BeginStaging(uint32_t rank, uint64_t step, uint32_t micro_step)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool WasBegun(uint64_t step) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void RenewEpoch(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropStaged(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Waits(uint32_t rank) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool NobodyWaits() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void ForgetLoss(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellOfLoss(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AbortForLoss(uint32_t lost, const std::string& what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteHeard(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellOfLost(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // job_micro_steps.cc
  absl::Status CheckSums(uint32_t rank) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status PushTogether(uint32_t rank, uint64_t step, uint32_t micro_step,
                            uint32_t first, uint32_t end)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckEnding(uint32_t rank, uint64_t step) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void SumWhole(uint32_t first, uint32_t end)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NotePast(uint32_t rank, int64_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AnswerEnding(uint32_t rank, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CarryEnded(uint32_t epoch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropSums(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetSums() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteHeardOfDrop(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellOfDrop(uint32_t rank, uint32_t dropped_by)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RestoreSums() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ResolveParameters(absl::Span<const uint8_t>* updated)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<StagedRange> StagedRanges(uint32_t rank) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);

  // job_speculation.cc
  void Speculate(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Speculated() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status TakeBackSpeculation() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // job_recovery.cc
  absl::Status CheckStepFiles(const JobDescription& description) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckStepFile(absl::string_view file, uint64_t bytes,
                             uint64_t needed) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status AdoptStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status PrepareRecovery(uint64_t step)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FindGradients() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status MapGradients(KeptGradients kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeGradients(const AttachSpec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  StepScheduler::Update UpdateOfRecovery() const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool LacksGradients(uint32_t rank) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  uint64_t GradientBytesOfRecovery(uint32_t rank) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void TryToFinishStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RestoreStaged() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RemoveStaleStagingFiles() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Returns whether the instance of `spec` is the rank's last attached one, in
  // this engine or a former one.
  bool WasAttachedLast(const AttachSpec& spec) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status AdmitToRecovery(const AttachSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckGradientsMayCome() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void FailRecovery(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropGradientsOfAway() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndRecovery() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeInstance(const AttachSpec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status BeingFinished() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status LostGradientsOf(uint64_t rank) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Fails the job in this engine: the store refused what it was in the middle
  // of, and the next engine goes on with that. Returns failure_.
  absl::Status FailInside(absl::string_view what, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status NotOfOneStep(absl::string_view why) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status LostInside(absl::string_view why) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  std::string HowToGoOn() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  // job_load.cc
  ElementAccess Elements() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return ElementAccess(store_.get());
  }
  bool HasWholeState() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckLoading(uint32_t rank) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status StartLoadRound() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `why` says to the other ranks what this rank has done.
  void LeaveLoadRound(uint32_t rank, absl::string_view why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropLoad(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteLoadTouches(uint32_t parameter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<size_t> PieceOf(uint32_t rank, const ElementRange& range) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  static absl::Status CheckDataBytes(uint64_t expected, uint64_t found);
  // Checks a range of an array with a number per parameter.
  absl::Status CheckNumbers(v1::StateArray array, uint64_t first,
                            uint64_t count, uint64_t bytes) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  static absl::Status CheckNoBegin(const ElementRange& range);
  absl::Status CheckNumber(v1::StateArray array, uint64_t parameter,
                           const std::byte* bytes) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  const std::byte* NumbersAt(v1::StateArray array, uint32_t parameter) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status LoadNumbers(const ElementRange& range,
                           absl::Span<const std::byte> data)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status LoadElements(uint32_t rank, const ElementRange& range,
                            DType dtype, absl::Span<const std::byte> data)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // job_load_apply.cc
  LoadLogHeader LoadHeader() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void DropStagedLoad() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<absl::Span<std::byte>> GrowLoadLog(uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ReserveLoadLog(uint64_t bytes, uint64_t bytes_max)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeLoad() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ApplyLoad(absl::Span<const LoadLogRecord> records)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RecordLoad() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AdoptLoad() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::vector<LoadLogRecord>> OpenSealedLoad()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckLoadRecords(absl::Span<const LoadLogRecord> records) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void AdoptUnfinishedLoad() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AdoptLoadedMasters() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // job_agreement.cc: these return an error when another rank is in a load, or
  // waits in a step; all ranks concerned have then been told or will be.
  absl::Status AgreeToStep(uint32_t rank, absl::string_view what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AgreeToLoad(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Disagreement(uint32_t loading, uint32_t stepping,
                            absl::string_view what) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void TellOfDisagreement(uint32_t by, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // job_durable.cc
  uint64_t SubGroupElements(const JobDescription& description) const;
  NvmeStore::Sizes SwapSizesOf(const JobDescription& description) const;
  absl::StatusOr<std::unique_ptr<StateStore>> MakeStore(
      const DurableCommit* restored) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsCommitDue() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status MakeDurable() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status MakeDurableIfDue(bool is_load)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AdoptCommit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndDurably();
  void DescribeDisk(v1::DiskState* disk) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status RestoreFromDisk() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CastParametersFromMasters() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status DropHalfRestored() const;

  // job_fetch.cc
  absl::Status CheckGradientNorms() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  // job_describe.cc
  void DescribeState(v1::Job* job) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void DescribeSessions(v1::Job* job) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  Options options_;
  mutable absl::Mutex mu_;
  const WorkerPlacement placement_;
  WorkerPool pool_;
  // Null while no layout is registered, or when the layout of a FAILED job
  // could not be used; the tier and the scheduler are then null too.
  std::unique_ptr<Shape> shape_ ABSL_GUARDED_BY(mu_);
  uint64_t shape_number_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<HostTier> tier_ ABSL_GUARDED_BY(mu_);
  // The records of the present layout and files; made with the scheduler, their
  // user.
  std::unique_ptr<StateStore> store_ ABSL_GUARDED_BY(mu_);
  // Points to the same store when the job has records on disk; null otherwise.
  NvmeStore* nvme_ ABSL_GUARDED_BY(mu_) = nullptr;
  absl::Time commit_requested_at_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::unique_ptr<StepScheduler> scheduler_ ABSL_GUARDED_BY(mu_);

  std::vector<RankSession> ranks_ ABSL_GUARDED_BY(mu_);
  std::vector<const std::byte*> gradient_areas_
      ABSL_GUARDED_BY(mu_);  // by rank
  OpenStep open_step_ ABSL_GUARDED_BY(mu_);
  MicroSteps micro_steps_ ABSL_GUARDED_BY(mu_);
  StepTimer timer_ ABSL_GUARDED_BY(mu_);
  std::optional<Recovery> recovery_ ABSL_GUARDED_BY(mu_);
  // Groups of the step that is decided, or speculated about.
  std::vector<StepIntentGroup> intent_groups_ ABSL_GUARDED_BY(mu_);
  // Holds sums of squares first, then norms.
  std::vector<double> group_norms_ ABSL_GUARDED_BY(mu_);
  std::vector<uint8_t> updated_of_group_ ABSL_GUARDED_BY(mu_);  // scratch
  // Norms by parameter, of step gradient_norms_step_ (0: none of this engine).
  std::vector<double> gradient_norms_ ABSL_GUARDED_BY(mu_);
  uint64_t gradient_norms_step_ ABSL_GUARDED_BY(mu_) = 0;
  LoadRound load_ ABSL_GUARDED_BY(mu_);
  StagedLoad staged_load_ ABSL_GUARDED_BY(mu_);  // of that round
  // Not OK: the job is FAILED, and calls return this status.
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool resting_ ABSL_GUARDED_BY(mu_) = false;  // until rest_end_, at most
  absl::Time rest_end_ ABSL_GUARDED_BY(mu_);
  bool had_session_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t skipped_steps_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_JOB_IMPL_H_
