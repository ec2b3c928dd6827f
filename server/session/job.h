#ifndef OPTSTATE_SERVER_SESSION_JOB_H_
#define OPTSTATE_SERVER_SESSION_JOB_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/types.pb.h"
#include "proto/types/accumulation.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "proto/types/unique_fd.h"
#include "server/session/former_rank.h"
#include "server/session/gradient_keeper.h"

namespace optstate {

class StepObserver;

// What became of a step; mirrors v1::StepOutcome, as plain data.
struct StepOutcome {
  uint64_t step = 0;
  bool applied = false;
  bool found_inf = false;
  double gradient_norm = 0;
  double clip_coefficient = 1;
  uint64_t update_ns = 0;
  double loss_scale = 0;  // for the next step; 0: the job has no LossScaler
  uint32_t good_steps = 0;
  uint32_t hysteresis_left = 0;
};

// Hears the answers that come later than the call. One per session, outlives
// it.
//
// Threads: called from any thread, one call at a time for one listener, also
// from within the Commit, EndMicroStep or FinishLoad that it answers, and with
// the job's lock held: it must not call the Job and must not block on a peer.
class SessionListener {
 public:
  virtual ~SessionListener() = default;
  virtual void OnStepDone(uint64_t request_id, const absl::Status& status,
                          const StepOutcome& outcome) = 0;
  // While an answer is outstanding: what its rank waits for.
  virtual void OnNotice(absl::string_view /*text*/) {}
};

struct RegisterSpec {
  Layout layout;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  std::string host_id;
  uint32_t local_world_size = 1;
  PartitionMode partition = PartitionMode::kGreedy;
  bool accumulate = false;
  bool ephemeral = false;
  bool extend = false;
  std::optional<v1::LossScaler> loss_scaler;
  AccumulateDType accumulate_dtype = AccumulateDType::kFloat32;
  RankProcess process;
  bool unchanged = false;  // see v1::RegisterRequest
  std::optional<v1::LossScalerState> loss_scaler_state;  // see there too
};

struct RegisterResult {
  std::string layout_hash;
  uint64_t committed_step = 0;
  v1::JobPhase phase = v1::JOB_PHASE_EMPTY;
  bool created = false;
  // Of this engine; another one when the job has changed its layout, partition,
  // world size or another setting. Never 0.
  uint64_t shape = 0;
};

struct AttachSpec {
  uint32_t rank = 0;
  std::string layout_hash;
  // As it was told when it registered: FAILED_PRECONDITION when the job has
  // another by now. 0: not said.
  uint64_t shape = 0;
  // Where the rank's gradients are: partition(rank).gradient_area_bytes bytes,
  // valid until Detach returns. Only read, and what is read is arithmetic
  // input alone, never a size or an index: the peer may be writing.
  const std::byte* gradient_area = nullptr;
  // How large it is; FAILED_PRECONDITION when the rank's partition needs more.
  uint64_t gradient_area_bytes = 0;
  SessionListener* listener = nullptr;
  // See v1::AttachRequest.
  uint64_t client_instance = 0;
  // It was attached before, to this engine or another: FAILED_PRECONDITION when
  // another instance has been there since, or the job is another.
  bool comes_back = false;
  // The area holds what this instance wrote there for the engine before this
  // one; else it does so once the rank has pushed again and committed.
  bool gradients_present = false;
  // The memory that they are in, for the job's GradientKeeper, when it is the
  // rank's own; the caller's.
  int gradient_segment = -1;
  uint64_t gradient_offset_bytes = 0;  // where in the segment they begin
  int64_t pid = 0;      // as the rank says, if the kernel does not; to be shown
  RankProcess process;  // whose end is the session's
  uint32_t uid = 0;
  std::string wire;
  std::string client_version;
};

// Pieces [first_piece, +piece_count) of a rank, accumulated up to a micro-step.
struct StagedRange {
  uint32_t first_piece = 0;
  uint32_t piece_count = 0;
  uint32_t micro_step = 0;
};

struct AttachResult {
  uint64_t committed_step = 0;
  v1::JobPhase phase = v1::JOB_PHASE_EMPTY;
  bool has_last_outcome = false;
  StepOutcome last_outcome;
  double loss_scale = 0;
  uint32_t good_steps = 0;
  uint32_t hysteresis_left = 0;
  uint32_t loads_finished = 0;
  uint32_t load_required_from = 0;
  bool speculates = false;
  std::vector<StagedRange> staged;  // see v1::AttachReply
};

struct CommitSpec {
  uint64_t step = 0;
  absl::Span<const Hyperparams> groups;
  // Of each group, see v1::GroupHyperparams; empty: all are clipped alone.
  absl::Span<const uint32_t> clips_with;
  double grad_scale = 1;
  double max_norm = 0;
  double max_value = 0;
  double norm_type = 2;  // 1, 2 or infinity
  bool found_inf = false;
};

// One training job: its layout, its state, who owns what, and the order of its
// steps. Knows nothing of sockets, rings or RPC: transports call it.
//
// Step rules (k = committed step):
//   push(k+1)    stages a piece; anything but k+1 is FAILED_PRECONDITION.
//   commit(k+1)  after it the rank may not push. When all world_size ranks have
//                committed with equal content, the step is decided (skip or
//                clip coefficient), applied and answered to all. Unequal
//                content: FAILED_PRECONDITION to all, what was staged is
//                dropped, the step can be taken again.
//   commit(k)    with the content of the recorded one returns the recorded
//                outcome; with another, FAILED_PRECONDITION.
//   A parameter is updated when all its pieces were pushed; none: left alone;
//   some but not all: FAILED_PRECONDITION to all, as above; replicated, on up
//   to 64 ranks, the gradients there are are summed.
//   Detach in an open step drops what the rank staged and its commit. Ranks
//   that wait for it go on waiting, and get a notice, or are answered ABORTED,
//   as the configuration's on_rank_loss says. Who comes to wait for it later
//   gets the notice.
//
// State: host-tier files in the job directory (storage/host_tier.h) and a
// control file that records the committed step, its outcome and a mark while a
// step is being applied. Open() adopts what is there. A job found with the mark
// set died in that step: runs in flight are rolled back, and the step is
// finished as it was decided, at once when the gradients that it needs are
// there (accumulated, in staging files, or in Options::kept). Else the job is
// RECOVERING until the ranks that have them attach again with the
// client_instance that committed; their pushes are taken for granted and their
// commits answered when the step is finished. When such a rank is replaced by
// another process the gradients are lost and the job is FAILED, also after it
// is opened again: Register says so in its phase, every other call returns
// DATA_LOSS naming the last good step, but for the BeginLoad of a rank that is
// attached still: it starts the job over from a checkpoint.
// With accumulation, what a rank has staged is there as well after a crash, for
// the same client_instance.
//
// Micro-steps of replicated jobs: see MicroSteps for what is summed when. A
// rank's gradients must stay as they are until its EndMicroStep is answered.
// Sums cannot be undone: when a rank drops what it staged (Abort, BeginLoad,
// Detach) after something was summed, all of the step is dropped, and whatever
// the other ranks call of it is ABORTED until they have aborted it too.
//
// Load rules: what must be loaded before a job is READY is every master of a
// new job, and those of the parameters that an extension brought. They are
// loaded in place: what a load that broke off (a rank or the engine died in it)
// has touched is zero again before the next one, and required.
// A load into parameters that have a state is staged beside it, in a log, and
// becomes the state when all ranks have finished, whole or not at all, whoever
// dies when: see storage/format/FORMAT.md. Until then the job is READY and
// gives the state of before. Whatever equals that bit by bit is not written.
// When a rank of the round is lost, begins anew or aborts, the round is over
// for all (ABORTED), and when there is no memory for the log
// (RESOURCE_EXHAUSTED).
// A rank that commits while another one loads, or loads while another one
// waits with its commit, is FAILED_PRECONDITION, and so are all others: see
// job_agreement.cc.
// BeginLoad drops what the rank has staged. A rank that detaches before all
// have finished has not finished. Abort drops its load too.
//
// Threads: thread-safe; one lock per job, held for the length of a call (the
// push statistics and the update run on the worker pool under it). After
// Attach, Push and Commit allocate nothing unless they fail.
class Job {
 public:
  struct Options {
    std::string name;
    uint32_t uid = 0;
    std::string directory;  // exists; on tmpfs as a rule
    v1::DaemonConfig config;
    // Of the engine that died, by whoever outlived it.
    std::vector<KeptGradients> kept;
    // Keeps the gradients of ranks that are attached, and, through a step that
    // is being finished or when the job cannot be opened, all that it has. May
    // be null; outlives the job.
    GradientKeeper* keeper = nullptr;
    StepObserver* observer = nullptr;  // tests only; outlives the job
    // By which a rest ends. Tests only: one that is ahead of the real one, and
    // after whose leaps somebody calls the job.
    std::function<absl::Time()> clock = absl::Now;
  };

  // What a transport without shared memory writes a rank's gradients into, so
  // that they outlive the engine (session/staging_file.h). The job removes it.
  virtual std::string StagingPath(uint32_t rank,
                                  uint64_t client_instance) const = 0;

  // Adopts the job that is in the directory, or starts an empty one. DATA_LOSS
  // when files are there that do not fit together (says which and why).
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

  // Of the registered layout; FAILED_PRECONDITION before Register.
  // Pointers stay valid until the next Register.
  virtual absl::StatusOr<const Layout*> layout() const = 0;
  virtual absl::StatusOr<const RankPartition*> partition(
      uint32_t rank) const = 0;
  // The file of the parameter area, of shm::ParameterSegmentBytes, for ranks to
  // map; it cannot be written through the fd.
  virtual absl::StatusOr<UniqueFd> OpenParameters() const = 0;
  // The same of what says how far the step is that is being taken, a uint64_t
  // for each run of the layout: the last step whose values the run has there;
  // of shm::RunStampsBytes. None when a step may be taken back.
  virtual absl::StatusOr<UniqueFd> OpenRunStamps() const = 0;

  // ALREADY_EXISTS when the rank is attached, or is away within a step and its
  // process runs (names its pid).
  virtual absl::StatusOr<AttachResult> Attach(const AttachSpec& spec) = 0;
  // Waits for a step that is being applied. Idempotent.
  virtual void Detach(uint32_t rank) = 0;
  // The same for good: a step that is being finished and needs gradients that
  // go with it fails.
  virtual void Leave(uint32_t rank) = 0;
  // The same of a session that says so on another connection than its own: at
  // once when it is away, else when its own connection is seen to end.
  virtual void TakeFarewell(uint32_t rank, uint64_t client_instance) = 0;

  // The ranks that were attached when the engine before ended, or since then
  // while its step was not finished, and are not here.
  // They come back by themselves, and the job is not finished before that; who
  // asks has to say when one will not.
  virtual std::vector<FormerRank> Awaited() const = 0;
  // It does not come back: lost, in the step that is open, as if it detached.
  // No effect when it is here.
  virtual void GiveUp(const FormerRank& rank) = 0;

  virtual absl::Status Push(uint32_t rank, uint64_t step, uint32_t micro_step,
                            uint32_t first_parameter,
                            uint32_t parameter_count) = 0;
  // The rank has pushed all that it has of this micro-step and those before.
  // Answered through the listener, errors included, when its gradient area may
  // be written again: at once, but for replicated jobs that accumulate. One at
  // a time.
  virtual void EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                            uint32_t micro_step) = 0;
  // Answered through the listener, errors included.
  virtual void Commit(uint32_t rank, uint64_t request_id,
                      const CommitSpec& spec) = 0;
  virtual absl::Status Abort(uint32_t rank, uint64_t step) = 0;

  virtual absl::Status BeginLoad(uint32_t rank) = 0;
  // `data` holds numel elements of `dtype` (STEP_COUNT: int64, dtype ignored,
  // one per parameter from `parameter`). Only elements of the rank's own pieces
  // (STEP_COUNT: any parameter): else INVALID_ARGUMENT.
  virtual absl::Status Load(uint32_t rank, v1::StateArray array,
                            uint32_t parameter, uint64_t begin, uint64_t numel,
                            DType dtype, absl::Span<const std::byte> data) = 0;
  // Answered through the listener when all ranks have finished. content_digest:
  // see v1::FinishLoadRequest.
  virtual void FinishLoad(uint32_t rank, uint64_t request_id,
                          uint64_t content_digest) = 0;

  // Copies numel elements (fp32; STEP_COUNT int64) to `out`; returns the
  // committed step that they belong to.
  virtual absl::StatusOr<uint64_t> Fetch(v1::StateArray array,
                                         uint32_t parameter, uint64_t begin,
                                         uint64_t numel,
                                         absl::Span<std::byte> out) = 0;
  // Copies [offset, +out.size()) of the parameter area.
  virtual absl::Status ReadParameters(uint64_t offset_bytes,
                                      absl::Span<std::byte> out) = 0;

  // Refuses pushes that would open a new step, and attaches, with UNAVAILABLE.
  virtual void BeginDrain() = 0;
  virtual void Resume() = 0;
  // Returns when the job drains and no step is open, nor begun by ranks that
  // come back, or at the deadline (DEADLINE_EXCEEDED).
  virtual absl::Status AwaitDrained(absl::Time deadline) = 0;
  // Returns when the job does not drain, or at the deadline.
  virtual absl::Status AwaitResumed(absl::Time deadline) = 0;

  // For jobs that are created or grow from now on.
  virtual void SetLimits(const v1::Limits& limits) = 0;

  // Waits until no step, load or recovery is under way; from then on, for
  // `lease`, none begins: Push, EndMicroStep, Commit and BeginLoad wait. For
  // whoever ends the process meanwhile; if nobody does, or at Resume, they go
  // on. DEADLINE_EXCEEDED: there was no such moment.
  virtual absl::Status Rest(absl::Time deadline, absl::Duration lease) = 0;
  virtual bool resting() const = 0;
  // Before the process ends, as if killed: waits for a pass that is being made;
  // from then on Push, EndMicroStep, Commit and BeginLoad wait. They are not
  // answered, and ask the next engine.
  virtual void StandStill() = 0;

  // True when the job should go: ephemeral (or never registered) and without
  // sessions after having had one.
  virtual bool finished() const = 0;

  virtual v1::Job Describe() const = 0;
  virtual absl::StatusOr<v1::ListParametersReply> ListParameters(
      const v1::ListParametersRequest& request) const = 0;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_JOB_H_
