#ifndef OPTSTATE_SERVER_SESSION_JOB_CONTEXT_H_
#define OPTSTATE_SERVER_SESSION_JOB_CONTEXT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/observe/trace_recorder.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/scheduler/step_scheduler.h"
#include "server/scheduler/workers/worker_placement.h"
#include "server/scheduler/workers/worker_pool.h"
#include "server/session/devices/job_devices.h"
#include "server/session/durability/record_move.h"
#include "server/session/durability/record_verifier.h"
#include "server/session/job.h"
#include "server/session/job_lock.h"
#include "server/session/job_shape.h"
#include "server/session/recovery/recovered_step.h"
#include "server/session/transfer/element_access.h"
#include "storage/format/control_file.h"
#include "storage/format/rank_mark.h"
#include "storage/host_tier.h"
#include "storage/memory/memory_locker.h"
#include "storage/state_store.h"

namespace optstate::session {

// The state that the rooms of one job share: its options, shape, files and
// records, the scheduler, and whether it has failed or finishes the step of a
// former engine. A room keeps its own state, and knows the rooms below it
// (README.md).
//
// Threads: the lock guards everything but the options, which do not change
// except for their limits and quotas, the placement and the pool. The lock is
// taken by JobImpl, and by no room.
// Size: one short question for each fact that several rooms ask for, so that
// each is answered in one way.
struct JobContext {
  explicit JobContext(Job::Options options);
  ~JobContext();

  // The methods below need a layout (shape is set) unless they say otherwise.
  const Layout& layout() const { return shape->description.layout; }
  bool is_replicated() const {
    return shape->description.partition == PartitionMode::kReplicated;
  }
  // Returns whether a run's accumulator has gradients of several ranks.
  bool accumulates_together() const {
    return is_replicated() && shape->description.accumulate;
  }
  uint32_t parameter_count() const {
    return static_cast<uint32_t>(layout().parameters().size());
  }
  const storage::StepRecord& record() const {
    return storage::CurrentRecord(*tier->control());
  }
  // Returns the phase that the job is in, with a layout or without.
  v1::JobPhase phase() const;
  // Returns whether every parameter has a valid state.
  bool HasWholeState() const {
    return record().load_required_from == parameter_count();
  }
  StepOutcome LastOutcome() const;
  storage::RankMark& rank_mark(uint32_t rank) const {
    return tier->recovery().rank_marks[rank];
  }
  // Returns the mark whose step and epoch say which marks of the rank's runs
  // count.
  storage::RankMark& staging_mark(uint32_t rank) const {
    return rank_mark(accumulates_together() ? 0 : rank);
  }
  // Returns whether the job has a store, with records on disk.
  bool HasDisk() const { return store != nullptr && store->has_disk(); }
  // Returns whether the job's parameters are a part of its records, so that
  // there is no area of them.
  bool HoldsParametersOnDisk() const {
    return shape->description.storage.parameters_on_disk();
  }
  // Returns the FAILED_PRECONDITION of calls that need the area, if there is
  // none.
  absl::Status CheckHasParameterArea() const;
  bool speculates() const { return shape->description.speculative; }
  // Returns whether the step is marked, but neither finished nor given up: in a
  // FAILED job it is the next engine's to finish, with the same gradients and
  // in the same shape.
  bool IsUnfinished(uint64_t step) const;
  ElementAccess Elements() const { return ElementAccess(store.get()); }
  // Returns the steps taken, by parameter: while a pass is being made, as they
  // were before it.
  absl::Span<const int64_t> StepCounts() const;

  // Returns FAILED_PRECONDITION, or why the job has failed, when there is no
  // layout.
  absl::Status CheckRegistered() const;
  absl::Status CheckHasDisk() const;
  absl::Status CheckParameterRange(uint64_t first, uint64_t count) const;
  // Returns the UNAVAILABLE of calls that come while a former engine's step is
  // being finished.
  absl::Status StillRecovering() const;
  // Fails the job in this engine: the store refused what it was in the middle
  // of, and the next engine goes on with that. Returns `failure`.
  absl::Status FailInside(absl::string_view what, const absl::Status& why);
  std::string DescribeWayOn() const;

  // Begins to verify the records on disk; see Job::Verify for its errors, of
  // which the caller has excluded those of drain and pause.
  absl::StatusOr<std::shared_ptr<Verification>> BeginVerification();
  // Does the same for a scrub. FAILED_PRECONDITION also: the job has failed, or
  // finishes the step of a former engine.
  absl::StatusOr<std::shared_ptr<Verification>> BeginScrub();
  // Ends the move of the records to other files, if one is under way, which
  // leaves them where they are: soon, or, on an idle job, before this returns.
  // These two need no layout.
  void CancelMove(absl::string_view why) const;
  void EndMove(absl::string_view why) const;
  // Destroys the store, whose user, the scheduler, is gone. Waits for the end
  // of a verification, and ends a move.
  void DropStore();

  // Makes a pass over the state that leaves the step counts as they are, or
  // waits for the state to reach a disk, as JobLock::MakePass does.
  absl::Status MakePass(absl::FunctionRef<absl::Status()> pass);
  // Makes a pass that reads or writes a few records, and may wait for a disk.
  // Where every record is in memory there is nothing to wait for, and the mutex
  // is kept.
  absl::Status AccessRecords(absl::FunctionRef<absl::Status()> access);
  // Makes a pass that changes the step counts.
  absl::Status MakeCountingPass(absl::FunctionRef<absl::Status()> pass);
  // Makes one that reads gradients: takes them in, or a norm of them.
  void Stage(const scheduler::StepScheduler::Staging& staging);
  double Norm(double type, const scheduler::StepScheduler::Update& update);

  // See Job::StagingPath.
  std::string StagingPath(uint32_t rank, uint64_t client_instance) const;
  std::string StateDir() const;

  // Records a rank's push, which began then (TraceSource::Begin), in a trace.
  void TracePush(int64_t begin_ns, uint32_t rank, uint32_t first,
                 uint32_t count);

  JobLock lock;
  // Thread-safe, see there; outlives those that record.
  observe::TraceRecorder trace;
  // The phases of steps, and what ranks do; recorded under the lock.
  observe::TraceSource step_spans;
  Job::Options options;
  const scheduler::WorkerPlacement placement;
  scheduler::WorkerPool pool;
  // Null while no layout is registered, or when the layout of a FAILED job
  // could not be used; the tier and the scheduler are then null too.
  std::unique_ptr<JobShape> shape;
  uint64_t shape_number = 0;
  // Outlives the tier, whose mappings it locks; see StateLock.
  storage::MemoryLocker memory_locker;
  std::optional<storage::HostTier> tier;
  // The records of the present layout and files; made with the scheduler, their
  // user.
  std::unique_ptr<storage::StateStore> store;
  RecordVerifier verifier;
  // Null in a job whose records are never moved.
  RecordMove* record_move = nullptr;
  // Opened when the job first shares updates with them, if ever.
  JobDevices devices;
  // Why updates are not shared with devices as the description says; else OK.
  absl::Status device_failure;
  // Made before the scheduler, its user.
  std::unique_ptr<scheduler::DeviceUpdateExecutor> executor;
  std::unique_ptr<scheduler::StepScheduler> scheduler;
  // Set while a step in which a former engine died is not finished.
  std::optional<RecoveredStep> recovery;
  // The status that calls return when the job is FAILED; else OK.
  absl::Status failure;
  // The step counts by parameter; empty unless a counting pass is being made.
  std::vector<int64_t> counts_before_pass;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_CONTEXT_H_
