#ifndef OPTSTATE_SERVER_SESSION_JOB_H_
#define OPTSTATE_SERVER_SESSION_JOB_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/types.pb.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "proto/types/unique_fd.h"
#include "server/session/job_types.h"
#include "server/session/monotonic_clock.h"
#include "server/session/ranks/former_rank.h"
#include "server/session/recovery/gradient_keeper.h"
#include "storage/state_file.h"

namespace optstate::accelerator {
class DeviceRuntime;
}  // namespace optstate::accelerator

namespace optstate::scheduler {
class StepObserver;
}  // namespace optstate::scheduler

namespace optstate::storage {
class StateMemory;
class StateStore;
}  // namespace optstate::storage

namespace optstate::session {

class WireCounters;

// One training job: its layout, its state, the partition of the state over
// ranks, and the order of its steps. Knows nothing of sockets, rings or RPC:
// transports call it.
//
// Step rules (k = committed step):
//   push(k+1)    stages a piece; anything but k+1 is FAILED_PRECONDITION.
//   commit(k+1)  after it the rank may not push. When all world_size ranks have
//                committed with equal content, the step is decided (skip or
//                clip coefficient), applied and answered to all. Unequal
//                content: FAILED_PRECONDITION to all, what was staged is
//                dropped, the step can be repeated.
//   commit(k)    with the content of the recorded commit returns the recorded
//                outcome; with other content, FAILED_PRECONDITION.
//   A parameter is updated when all its pieces were pushed and left alone when
//   none was; some but not all: FAILED_PRECONDITION to all, as above; when
//   replicated, on up to 64 ranks, the gradients that were pushed are summed.
//   Detach in an open step drops what the rank staged and its commit. Ranks
//   that wait for this rank go on waiting, and get a notice, or are answered
//   ABORTED, as the configuration's on_rank_loss says. Ranks that begin to
//   wait later get the notice.
//
// State: host-tier files in the job directory (storage/host_tier.h) and a
// control file that records the committed step, its outcome and a mark while a
// step is being applied. Open() adopts existing files. A job found with the
// mark set crashed in that step: runs in flight are rolled back, and the step
// is finished as it was decided, at once when the gradients that it needs
// exist (accumulated, in staging files, or in Options::kept). Else the job is
// RECOVERING until the ranks that hold them attach again with the
// client_instance that committed; their pushes are taken for granted and their
// commits answered when the step is finished. When such a rank is replaced by
// another process the gradients are lost and the job is FAILED, also after it
// is opened again: Register says so in its phase, every other call returns
// DATA_LOSS naming the last good step, except BeginLoad of a rank that is still
// attached, which starts the job over from a checkpoint.
// With accumulation, what a rank has staged also survives a crash, for the same
// client_instance.
//
// Micro-steps of replicated jobs: see MicroSteps for what is summed when. A
// rank's gradients must stay unchanged until its EndMicroStep is answered.
// Sums cannot be undone: when a rank drops what it staged (Abort, BeginLoad,
// Detach) after something was summed, all of the step is dropped, and the other
// ranks' calls for this step return ABORTED until they have aborted it too.
//
// Load rules: a job becomes READY once every master of a new job, and the
// masters of the parameters that an extension added, are loaded. These are
// loaded in place: what an interrupted load (a rank or the engine died in it)
// has touched is zeroed before the next load, and required again.
// A load into parameters that have a state is staged beside it, in a log, and
// becomes the state when all ranks have finished, whole or not at all, at any
// crash: see storage/format/FORMAT.md. Until then the job is READY and returns
// the previous state. Values that equal that state bit by bit are not written.
// When a rank of the round is lost, begins anew or aborts, the round ends for
// all (ABORTED), and likewise when there is no memory for the log
// (RESOURCE_EXHAUSTED), or a record is found damaged of which the load had left
// out a part as equal (ABORTED). The same load made again replaces that record.
// A rank that commits while another one loads, or loads while another one
// waits with its commit, gets FAILED_PRECONDITION, and so do all others: see
// steps/agreement.cc.
// BeginLoad drops what the rank has staged. A rank that detaches before all
// have finished has not finished. Abort drops the rank's load too.
//
// Threads: thread-safe; one lock per job. Calls exclude each other from their
// begin to their end, those that wait for a pause left aside. Describe and
// ListParameters never wait for gradients that are taken in, nor for a step
// that is being applied or made durable, nor for a disk that a load or a fetch
// waits for; nor do BeginDrain, Resume, Awaited, GiveUp, finished and the
// queries of the shape. After Attach, Push and Commit allocate nothing unless
// they fail.
// Size: one method for each call that a transport, the engine or an operator
// makes.
class Job {
 public:
  struct Options {
    std::string name;
    uint32_t uid = 0;
    std::string directory;  // exists; on tmpfs as a rule
    v1::DaemonConfig config;
    // Gradients of the engine that died, kept by a process that outlived it.
    std::vector<KeptGradients> kept;
    // Keeps the gradients of attached ranks, and, while a step is being
    // finished or when the job cannot be opened, all that it holds. May be
    // null; must outlive the job.
    GradientKeeper* keeper = nullptr;
    // Counts the bytes that the job has read from disk and written there, so
    // that others see it work while it opens or ends. May be null; must outlive
    // the job.
    std::atomic<uint64_t>* disk_bytes = nullptr;
    // The bytes that transports have counted, for Describe(). May be null; must
    // outlive the job.
    const WireCounters* wires = nullptr;
    // An observer for tests; must outlive the job.
    scheduler::StepObserver* observer = nullptr;
    // Makes the store of a job whose records are all in memory, in place of a
    // HostStore. `incarnation` is that of the job's files. Tests only.
    std::function<absl::StatusOr<std::unique_ptr<storage::StateStore>>(
        const Layout* layout, uint64_t sub_group_elements,
        const storage::StateMemory& memory, uint64_t incarnation)>
        make_host_store = nullptr;
    // Makes emulated devices in place of those of the configuration; outlives
    // the job. Tests only.
    accelerator::DeviceRuntime* device_runtime = nullptr;
    // The clock that ends a pause, makes a scrub due and a step durable;
    // thread-safe. Tests only: another clock may run ahead of the real one, and
    // each leap must be followed by a call of the job; for a scrub, Resume.
    std::function<absl::Time()> clock = MonotonicNow;
    // The clock of times that are noted on disk or shown. Tests only.
    std::function<absl::Time()> wall_clock = absl::Now;
  };

  // Returns the path of the file into which a transport without shared memory
  // writes a rank's gradients, so that they outlive the engine
  // (session/recovery/staging_file.h). The job removes the file.
  virtual std::string StagingPath(uint32_t rank,
                                  uint64_t client_instance) const = 0;
  // Opens that file, or makes one of zeros; `present` says which. A file that
  // is made is state: RESOURCE_EXHAUSTED when the limits of all jobs, the
  // quotas of the job's owner or the memory do not have its bytes; then no file
  // is left behind.
  virtual absl::StatusOr<storage::StateFile> MakeStaging(
      uint32_t rank, uint64_t client_instance, uint64_t gradient_area_bytes,
      bool* present) = 0;

  // Adopts the job in the directory, or starts an empty one. Returns DATA_LOSS
  // when the files do not fit together (says which and why).
  static absl::StatusOr<std::unique_ptr<Job>> Open(Options options);
  virtual ~Job() = default;

  // See v1::RegisterRequest. FAILED_PRECONDITION: other layout (first
  // difference named), or another world size or partition while ranks are
  // attached, are away within a step and their processes run, or when the job
  // is to be unchanged (NOT_FOUND: there is none). RESOURCE_EXHAUSTED: the
  // state does not fit the memory, the state directory or the limits (says how
  // many bytes are needed and left); nothing is left behind. UNIMPLEMENTED:
  // ranks on several machines.
  virtual absl::StatusOr<RegisterResult> Register(const RegisterSpec& spec) = 0;

  // The next two describe the registered layout; FAILED_PRECONDITION before
  // Register. Pointers stay valid until the next Register.
  virtual absl::StatusOr<const Layout*> layout() const = 0;
  virtual absl::StatusOr<const RankPartition*> partition(
      uint32_t rank) const = 0;
  // Returns the file of the parameter area, of shm::ParameterSegmentBytes, for
  // ranks to map; the fd does not permit writing. FAILED_PRECONDITION: there is
  // none, the parameters are on disk.
  virtual absl::StatusOr<UniqueFd> OpenParameters() const = 0;
  // Returns, likewise, the file of the progress of the current step, of
  // shm::RunStampsBytes: a uint64_t for each run of the layout, the last step
  // whose values the run has in the parameter area. No fd when a step may be
  // rolled back.
  virtual absl::StatusOr<UniqueFd> OpenRunStamps() const = 0;

  // Has the device of this name (v1::ShareParametersRequest) keep the
  // parameters of records that stay there in memory that ranks map, and returns
  // that, with its table. Errors: those of v1::ShareParametersReply; nothing
  // has changed then.
  virtual absl::StatusOr<DeviceParameters> ShareParameters(
      absl::string_view device) = 0;
  // Has the device of this name take gradients of an attached rank from the
  // rank's memory there, until the rank is detached. Errors: those of
  // v1::ShareGradientsReply; none are taken from there then.
  virtual absl::Status ShareGradients(uint32_t rank, absl::string_view device,
                                      DeviceGradients gradients) = 0;

  // Returns ALREADY_EXISTS when the rank is attached, or is away within a step
  // and its process runs (names its pid).
  virtual absl::StatusOr<AttachResult> Attach(const AttachSpec& spec) = 0;
  // Detaches the rank, after any step that is being applied. Idempotent.
  virtual void Detach(uint32_t rank) = 0;
  // Detaches the rank for good: a step that is being finished and needs the
  // rank's gradients fails.
  virtual void Leave(uint32_t rank) = 0;
  // Does the same for a session that leaves through another connection than its
  // own: at once when the rank is away, else when its own connection is seen to
  // end.
  virtual void NoteFarewell(uint32_t rank, uint64_t client_instance) = 0;

  // Returns the ranks that were attached when the previous engine ended, or
  // since then while its step was unfinished, and are away now. They return by
  // themselves, and the job is not finished before that; the caller has to
  // report (GiveUp) a rank that will not return.
  virtual std::vector<FormerRank> Awaited() const = 0;
  // Reports a rank that does not return: lost, in the open step, as if it
  // detached; while a step is being applied, once that has ended. No effect
  // when the rank is attached.
  virtual void GiveUp(const FormerRank& rank) = 0;

  virtual absl::Status Push(uint32_t rank, uint64_t step, uint32_t micro_step,
                            uint32_t first_parameter,
                            uint32_t parameter_count) = 0;
  // Does a part of the open step, or of what a later one would have to do, that
  // no rank waits for yet, and which takes some milliseconds, unless a
  // parameter is very large. A transport calls it when it has answered a push
  // or a commit and the rank asks for nothing else. Returns whether there may
  // be more to do.
  virtual bool WorkAhead(uint32_t rank) = 0;
  // Says that the rank has pushed all its gradients of this and earlier
  // micro-steps. Answered through the listener, errors included, when its
  // gradient area may be written again: at once, except in replicated jobs that
  // accumulate. One at a time.
  virtual void EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                            uint32_t micro_step) = 0;
  // Answered through the listener, errors included.
  virtual void Commit(uint32_t rank, uint64_t request_id,
                      const CommitSpec& spec) = 0;
  virtual absl::Status Abort(uint32_t rank, uint64_t step) = 0;

  // Says how far the job is: nodes compare that before they go on together.
  // A job without a layout is as one that is not there: at step 0. UNAVAILABLE
  // while a decided step waits for gradients; or why the job has failed.
  virtual absl::StatusOr<JobPosition> Position() = 0;
  // Does with the prepared step what all nodes decided; see v1::DecideRequest.
  // Answered through the listener, errors included.
  virtual void Decide(uint32_t rank, uint64_t request_id,
                      const StepVerdict& verdict) = 0;
  // Does the same for a session that is not attached.
  virtual absl::StatusOr<StepOutcome> DecideUnattached(
      const StepVerdict& verdict) = 0;

  virtual absl::Status BeginLoad(uint32_t rank) = 0;
  // Loads numel elements of `dtype` from `data` (STEP_COUNT: int64, dtype
  // ignored, one per parameter from `parameter`). Only elements of the rank's
  // own pieces (STEP_COUNT: any parameter) are accepted: else INVALID_ARGUMENT.
  virtual absl::Status Load(uint32_t rank, v1::StateArray array,
                            uint32_t parameter, uint64_t begin, uint64_t numel,
                            DType dtype, absl::Span<const std::byte> data) = 0;
  // Answered through the listener when all ranks have finished, errors
  // included.
  virtual void FinishLoad(uint32_t rank, uint64_t request_id,
                          const LoadEnd& end) = 0;

  // Copies numel elements (fp32; PARAMETER in its dtype; STEP_COUNT int64) to
  // `out`; returns the committed step to which they belong.
  virtual absl::StatusOr<uint64_t> Fetch(v1::StateArray array,
                                         uint32_t parameter, uint64_t begin,
                                         uint64_t numel,
                                         absl::Span<std::byte> out) = 0;
  // Says which parameters are going to be fetched, or are not any more; see
  // v1::ParameterHint. Waits for no disk.
  virtual absl::Status HintParameters(ParameterHint hint, uint32_t first,
                                      uint32_t count) = 0;
  // Copies [offset, +out.size()) of the parameter area. FAILED_PRECONDITION:
  // there is none, the parameters are on disk.
  virtual absl::Status ReadParameters(uint64_t offset_bytes,
                                      absl::Span<std::byte> out) = 0;

  // Refuses pushes that would open a new step, and attaches, with UNAVAILABLE.
  virtual void BeginDrain() = 0;
  virtual void Resume() = 0;
  // Returns when the job drains and no step is open or begun by ranks that are
  // to return, or at the deadline (DEADLINE_EXCEEDED).
  virtual absl::Status AwaitDrained(absl::Time deadline) = 0;
  // Returns when the job does not drain, or at the deadline.
  virtual absl::Status AwaitResumed(absl::Time deadline) = 0;

  // Sets the limits for creation or growth of the job from now on.
  virtual void SetLimits(const v1::Limits& limits) = 0;
  // Sets the quotas likewise; see access::Quotas.
  virtual void SetQuotas(
      const google::protobuf::RepeatedPtrField<v1::Quota>& quotas) = 0;

  // Waits until no step, load or recovery is under way; from then on, for
  // `lease`, none begins: Push, EndMicroStep, Commit and BeginLoad wait. This
  // lets the caller end the process meanwhile; after the lease, or at Resume,
  // the calls go on. DEADLINE_EXCEEDED: there was no such moment.
  virtual absl::Status Pause(absl::Time deadline, absl::Duration lease) = 0;
  virtual bool paused() const = 0;
  // Stops the job before the process ends as if killed: waits for a pass that
  // is being made; from then on Push, EndMicroStep, Commit and BeginLoad wait.
  // They are never answered; their callers ask the next engine.
  virtual void Stop() = 0;

  // Reads the job's records on disk and compares them with their checksums, see
  // StateStore::Verify, while steps go on; ends a scrub. `progress` is called
  // several times a second, the last time with `done`; false: CANCELLED.
  // FAILED_PRECONDITION: nothing is on disk, another call verifies the job, or
  // it drains, pauses or has stopped; ABORTED: it begins to, or its store is
  // made anew. These wait for a read of one record at most, and never for
  // `progress`.
  virtual absl::Status Verify(
      absl::FunctionRef<bool(const v1::VerifyJobProgress&)> progress) = 0;

  // Calls `pass` several times a second with what has been done since, and
  // when, from the first push of the next step on, until so many steps are
  // over, or shortly before the deadline, or when nothing of a step has
  // happened for a minute; the last time with `done`. Training goes on, with
  // the same results. INVALID_ARGUMENT: so many steps are too many;
  // FAILED_PRECONDITION: the job has no state yet, drains, pauses or has
  // stopped, or another call traces it; CANCELLED: `pass` has returned false;
  // or why the job has failed. The job outlives the call, which waits for no
  // step.
  virtual absl::Status Trace(
      const v1::TraceJobRequest& request, absl::Time deadline,
      absl::FunctionRef<bool(const v1::TraceChunk&)> pass) = 0;

  // Changes settings between two passes, for the next engines too; results stay
  // the same bits. Returns when they are in force. FAILED_PRECONDITION: such a
  // job has no such setting, it has failed, or it drains, pauses or has
  // stopped; INVALID_ARGUMENT: a value is too small, with the least;
  // RESOURCE_EXHAUSTED: there is no room for more frames. Nothing has changed
  // then.
  virtual absl::StatusOr<v1::SetJobReply> Set(
      const v1::SetJobRequest& request) = 0;

  // Returns true when the job should go: ephemeral (or never registered) and
  // without sessions after having had one.
  virtual bool finished() const = 0;

  virtual v1::Job Describe() const = 0;
  virtual absl::StatusOr<v1::ListParametersReply> ListParameters(
      const v1::ListParametersRequest& request) const = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_H_
