// optstate's C++ client: one rank's session with the daemon that owns the
// optimizer state of its job.
//
//   client::SessionOptions options;
//   options.job = "gpt";
//   options.layout = ...;  // every parameter of the job, on every rank
//   auto session = client::Session::Open(options);
//   for each step:
//     write gradients into *(*session)->gradient(i), then Push, or
//     PushGradients(step, ...) from memory of your own;
//     (*session)->Commit({.step = step, .groups = ...});
//     read (*session)->parameter(i)
//
// Errors are absl::Status with the daemon's own text, prefixed with the job and
// the endpoint. A caller can rely on these codes:
//   INVALID_ARGUMENT     dtype, shape, numel, hyperparameters, endpoint
//   FAILED_PRECONDITION  another layout than the registered one, a step out of
//                        order, unequal commits
//   ALREADY_EXISTS       another live process is this rank
//   RESOURCE_EXHAUSTED   the job does not fit the machine or the limits
//   ABORTED              the staged gradients are lost: run the step again
//   DATA_LOSS            the job's state is damaged; names the last good step
//   UNAVAILABLE          no daemon, or it is draining
//   DEADLINE_EXCEEDED    other ranks, or the daemon, took too long
//   CANCELLED            SessionOptions::interrupted returned true
// The session stays usable after any of these errors.
#ifndef OPTSTATE_CLIENT_CLIENT_H_
#define OPTSTATE_CLIENT_CLIENT_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/session/load_digest.h"
#include "client/session_types.h"
#include "client/views/device_gradients.h"
#include "client/views/device_parameters.h"
#include "client/views/gradient_views.h"
#include "client/views/parameter_views.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "proto/types/step_verdict.h"

namespace optstate::client {

class Channel;
class ParameterDigests;
class ParameterReader;
struct Attached;
struct ChannelSetup;
struct FetchRange;

// The number of elements of one parameter's state array; 1 for arrays with one
// number per parameter.
uint64_t ElementCount(const Layout& layout, StateArray array,
                      const ParameterSpec& parameter);

// One rank's session.
//
// When the engine or the connection is lost, the call that notices the loss
// reconnects (for at most connect_timeout), repeats the pushes of the open
// step, and goes on: the trainer sees a delay. A step that had been committed
// is not applied twice.
//
// Lifetime: spans returned here stay valid, at the same address, until the
// session is closed or destroyed. A session belongs to the process that opened
// it: in a forked child every call is FAILED_PRECONDITION, and closing the
// session there does not disturb the parent's.
// Threads: one at a time; different sessions are independent. Calls block the
// calling thread alone.
// Size: one method for each call of the API that a trainer has.
class Session {
 public:
  // Connects, registers the layout and attaches the rank. A job that does not
  // exist is created, in phase kLoading. Fails at once when nothing listens at
  // the endpoint, unless a daemon has left its socket there: Open then waits
  // for the daemon.
  static absl::StatusOr<std::unique_ptr<Session>> Open(SessionOptions options);

  // Opens a session over a channel made by the caller from the options; for
  // tests.
  using ChannelFactory =
      absl::FunctionRef<absl::StatusOr<std::unique_ptr<Channel>>(
          ChannelSetup setup)>;
  static absl::StatusOr<std::unique_ptr<Session>> OpenOver(
      ChannelFactory factory, SessionOptions options);

  // Closes the session.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Detaches: the rank is free when this returns. Staged gradients are dropped.
  // After a loss of the engine, Close waits up to 5 s for the next engine and
  // tells it that the rank has left, but does not wait for a daemon that is not
  // there: once started again, that daemon awaits the rank until the rank's
  // process ends.
  // Later calls are FAILED_PRECONDITION; a second Close does nothing.
  void Close();

  SessionInfo info() const;
  uint64_t committed_step() const { return committed_step_; }
  const Layout& layout() const;

  // The pieces that this rank owns, by parameter; at most one piece a
  // parameter.
  size_t piece_count() const;
  GradientPiece piece(size_t index) const;
  // Returns the memory for the gradient of a piece: numel elements, to be
  // written. Over shared memory its pages are taken after Open: waits until the
  // piece has them, so that writing it cannot raise SIGBUS. RESOURCE_EXHAUSTED:
  // there is no memory for them; says what to do.
  absl::StatusOr<absl::Span<std::byte>> gradient(size_t index);
  // The parameter as of the committed step: numel elements of its own dtype,
  // contiguous, read-only; empty with SessionOptions::fetches_parameters. The
  // values change during Commit (any rank's) and FinishLoad. Over shared memory
  // those of a speculative job also change from this rank's first push of a
  // step on, and are of no step then, until RollBackSpeculation().
  absl::Span<const std::byte> parameter(uint32_t parameter) const;
  // DATA_LOSS, with the file's name: another process has cut the parameter file
  // short, so that parameter() has zeros in the place of values. The calls that
  // read parameters, push, commit and load fail with it too.
  absl::Status CheckParameterArea() const;

  // Maps the parameters as memory that the trainer may write; the mapping
  // outlives the session. UNIMPLEMENTED: the wire copies parameters, the daemon
  // speculates, or the kernel does not report which pages were written.
  absl::StatusOr<std::unique_ptr<ParameterViews>> MapViews();
  // Maps the rank's gradient area a second time, as memory that the trainer may
  // write while no push of this rank is under way; the mapping outlives the
  // session. UNIMPLEMENTED: the wire copies gradients, or the kernel cannot.
  absl::StatusOr<std::unique_ptr<GradientViews>> MapGradientViews();
  // Asks for the memory of a device in which the engine keeps parameters, for a
  // rank that has the device; see v1::ShareParametersRequest. It outlives the
  // session. NOT_FOUND: nothing of the job stays on a device; UNIMPLEMENTED:
  // the wire copies, or the daemon is older; other errors say why there is
  // none. parameter() has all values, as always.
  absl::StatusOr<std::unique_ptr<DeviceParameters>> MapDeviceParameters(
      absl::string_view device);
  // Finds the parts of a parameter that are there, see
  // DeviceParameters::FindRanges: none once the session has another connection.
  absl::Status FindOnDevice(const DeviceParameters& parameters,
                            uint32_t parameter,
                            std::vector<DeviceParameters::Range>* ranges) const;
  // Finds likewise where whole parameters are, see DeviceParameters::FindWhole.
  absl::Status FindWholeOnDevice(const DeviceParameters& parameters,
                                 absl::Span<const uint32_t> wanted,
                                 absl::Span<uint64_t> offsets) const;
  // Offers the engine memory of a device in which the rank has gradients
  // besides its gradient area: a file that the driver has exported, and its
  // bytes, which are read until the session offers other memory, gives it up or
  // ends. Returns the table in which the caller says what is there. NOT_FOUND:
  // nothing of the job stays on a device, or updates read sums; UNIMPLEMENTED:
  // the wire copies, or the daemon is older; other errors say why the engine
  // takes none from there. The gradient area has all gradients, as always: from
  // there a step is finished when the engine dies.
  absl::StatusOr<std::unique_ptr<DeviceGradients>> ShareGradients(
      absl::string_view device, int memory_file, uint64_t memory_bytes);
  // Returns whether the engine of the present connection has that memory; else
  // it is to be offered anew.
  bool IsShared(const DeviceGradients& gradients) const;
  // Gives up what was offered: nothing reads it when this returns.
  absl::Status GiveUpGradients();
  // Returns whether the engine is known to be writing parameters of the step
  // whose commit is under way: some of the new values are there already.
  bool WritesParameters() const;
  // Finds the parameters, ascending, that differ from those of the committed
  // step because the trainer has written them in `views`. DATA_LOSS: the
  // parameter file was cut short. FAILED_PRECONDITION while a commit is under
  // way.
  absl::Status FindWritten(ParameterViews* views,
                           std::vector<uint32_t>* parameters);

  // Declares that the rank's pieces of parameters [first, +count) hold their
  // gradients of `step`, which is committed_step + 1. Returns when the push is
  // submitted; an error of the daemon shows at a later Push, Flush or Commit,
  // and then nothing of the step is staged any more: push all of the step
  // again. The gradients must not change until Commit returns or, when
  // `accumulate` is set, until EndMicroStep returns. micro_step: 0, 1, ...
  // within a step.
  absl::Status Push(uint64_t step, uint32_t micro_step, uint32_t first,
                    uint32_t count);
  // Copies the owned pieces out of whole, contiguous gradients and pushes them.
  // gradients[i] has the numel and the gradient dtype of parameters[i];
  // `parameters` ascends, and those that this rank does not own are passed
  // over. The caller may reuse its memory when this returns, but not a
  // gradient's own piece, from which nothing is copied: see Push.
  absl::Status PushGradients(uint64_t step, uint32_t micro_step,
                             absl::Span<const uint32_t> parameters,
                             absl::Span<const void* const> gradients);
  // Waits until the engine has taken every push.
  absl::Status Flush();
  // Declares that this rank has pushed all its gradients of micro-steps up to
  // this one (possibly none), and waits until those gradients may be
  // overwritten. With PartitionMode::kReplicated that is when the ranks'
  // gradients are summed: the call waits for ranks that have not come as far.
  // ABORTED: another rank was lost or has aborted, and the sums of the step are
  // lost.
  absl::Status EndMicroStep(uint64_t step, uint32_t micro_step);

  // Commits the step: waits until every rank has committed and the step is
  // applied or skipped. When the step is applied, `read` receives its values,
  // copied part by part: updated parts are copied while others are still being
  // updated (over shared memory, unless the job speculates). After an error
  // `read` may have parts of the new values; after CANCELLED only if the engine
  // hangs within the step.
  // A repeated Commit of the committed step with equal content returns the
  // recorded outcome. After an error nothing of the step is staged any more,
  // except after DEADLINE_EXCEEDED: then Commit may be called again, to go on
  // waiting, while a push begins the step anew. After CANCELLED the commit is
  // under way (info().commit_open) and CommitWait goes on with it.
  absl::StatusOr<Outcome> Commit(const CommitOptions& options,
                                 const ParameterTargets& read = {});
  // The two halves of Commit; in between, only CommitWait may be called. An
  // error of either ends the commit, except CANCELLED: then CommitWait is due.
  absl::Status CommitStart(const CommitOptions& options);
  absl::StatusOr<Outcome> CommitWait(const ParameterTargets& read = {});
  // Takes or drops the step that Commit prepared (SessionOptions::two_phase),
  // as all nodes decided; returns its outcome or, of one that is aborted, an
  // empty one. A repeat returns the same. FAILED_PRECONDITION: the step is not
  // prepared, or something else was, or it was decided otherwise.
  absl::StatusOr<Outcome> Decide(const StepVerdict& verdict);
  // Copies parameters as of the committed step. Of a speculative job, calls
  // RollBackSpeculation().
  absl::Status ReadParameters(const ParameterTargets& read);
  // Makes parameter() be of the committed step until the next Commit: what the
  // engine has begun early of the open step is rolled back, which takes time,
  // and nothing more of this step is begun early. Does nothing for a job that
  // is not speculative, before the first push of a step, and when it has been
  // called in the step. FAILED_PRECONDITION while a commit is under way.
  absl::Status RollBackSpeculation();
  // Finds copies made by Commit or ReadParameters, wherever the copies are now,
  // whose content has changed since. SessionOptions::change_detection says how
  // copies are checked; with kOff none are found.
  absl::Status FindChanged(const ParameterTargets& copies,
                           std::vector<uint32_t>* changed) const;
  // Declares that the caller's copies of these parameters hold the current
  // values without having been read: the caller has loaded the values.
  absl::Status NoteCopies(absl::Span<const uint32_t> parameters);
  // Drops everything that this rank has staged of `step`, and a load that the
  // rank has begun and not finished.
  absl::Status Abort(uint64_t step);

  // Begins a load: the initial parameters of a new job, or the state of a
  // checkpoint. Every rank begins, loads whole arrays of parameters (parts that
  // the rank does not own are passed over, so each rank may load everything),
  // and finishes, which waits for all ranks. `data` holds numel elements of
  // `dtype` (kStepCount: one int64, and dtype is ignored). An error of the
  // daemon may show only at a later Load or at FinishLoad. The job keeps its
  // former state until all ranks have finished, and for good when some rank
  // does not finish. ABORTED: a rank or the connection was lost before; begin
  // the load again. FAILED_PRECONDITION: another rank commits the step instead.
  //
  // LoadContent::kSame: every rank loads all that any rank loads, with equal
  // values; when they do not, FinishLoad is FAILED_PRECONDITION on all.
  absl::Status BeginLoad(LoadContent content = LoadContent::kOwn);
  absl::Status Load(StateArray array, uint32_t parameter, DType dtype,
                    absl::Span<const std::byte> data);
  // begin_at: the job has taken no step, and takes over the state of another
  // one, whose step and loads it has with the end of this load, as
  // v1::FinishLoadRequest says; equal on all ranks. UNIMPLEMENTED: the daemon
  // is of an older build.
  absl::Status FinishLoad(std::optional<BeginAt> begin_at = std::nullopt);
  // Copies a whole array of one parameter, of any rank, to `out`: numel fp32
  // elements (kParameter: of its dtype; kStepCount: one int64). Returns the
  // step that the values belong to.
  absl::StatusOr<uint64_t> Fetch(StateArray array, uint32_t parameter,
                                 absl::Span<std::byte> out);
  // Fetches many arrays as Fetch does, without a round trip for each where the
  // wire allows it.
  absl::StatusOr<uint64_t> FetchMany(absl::Span<const FetchTarget> targets);
  // Says that these parameters are going to be fetched, or are not any more;
  // see v1::ParameterHint. Waits for no disk.
  absl::Status HintParameters(ParameterHint hint,
                              absl::Span<const uint32_t> parameters);
  // FAILED_PRECONDITION: the session fetches parameters one by one, and has
  // none to read, map or compare.
  absl::Status CheckHasParameters() const;

 private:
  struct MicroStep {
    uint64_t step = 0;
    uint32_t micro_step = 0;
  };
  // The last push of a piece.
  struct PieceMark {
    uint64_t step = 0;
    int64_t micro_step = kNone;
    int64_t micro_step_before = kNone;  // of the same step
    // The value of ended_ at the push: after the next end of a micro-step the
    // caller may have written other gradients in this place.
    uint64_t ended = 0;
    // The place has no memory any more: the daemon has the gradient.
    bool is_released = false;
  };
  static constexpr int64_t kNone = -1;
  // Pieces [begin, end) whose gradients are copied, but not pushed yet.
  struct PieceRun {
    size_t begin = 0;
    size_t end = 0;
    uint64_t bytes = 0;
  };

  explicit Session(SessionOptions options);

  absl::Status Connect(std::unique_ptr<Channel> channel);
  absl::Status AnnotateWithJob(const absl::Status& status) const;

  // OK when the session may be used; reconnects when the connection is lost.
  absl::Status Ready();
  // Calls `verb` until it answers over a connection that lasts.
  absl::Status Persist(absl::FunctionRef<absl::Status()> verb);
  absl::Status Recover();
  enum class Attempt { kFirst, kAgain };
  absl::Status ConnectWithin(Attempt attempt, Attached* attached);
  void Leave();
  absl::Status CheckSameJob(const Attached& attached) const;
  absl::Status PushAgain(const Attached& attached);
  absl::Status PushMicroStepAgain(uint64_t step, int64_t micro_step,
                                  absl::FunctionRef<bool(size_t piece)> pushes);
  absl::Status ReleaseCopied(const PieceRun& run);

  absl::Status CheckUsable() const;
  // Does CheckUsable() and also checks that no commit is under way.
  absl::Status CheckIdle() const;
  // Does CheckIdle() and CheckParameterArea().
  absl::Status CheckWhole() const;
  absl::Status CheckParameters(uint32_t first, uint32_t count) const;
  // Says whether the parameters are those of the present engine: the table of a
  // former one says nothing of what its successor has changed.
  bool IsOfThisConnection(const DeviceParameters& parameters) const;
  absl::Status PushRun(uint64_t step, uint32_t micro_step, uint32_t first,
                       uint32_t count);
  absl::Status CheckTargets(const ParameterTargets& read) const;
  absl::StatusOr<Outcome> AwaitCommit();
  absl::Status TakeOutcome(const Outcome& outcome);
  absl::Status CheckGradients(absl::Span<const uint32_t> parameters,
                              absl::Span<const void* const> gradients) const;
  bool accumulates_together() const {
    return options_.accumulate &&
           options_.partition == PartitionMode::kReplicated;
  }
  void NoteEnded();
  absl::Status PushCopied(uint64_t step, uint32_t micro_step,
                          const PieceRun& run);
  bool OwnsAt(size_t piece, uint32_t parameter) const;
  uint64_t GradientBytes(const Piece& piece) const;
  // Waits for the memory of the gradients of parameters before this one.
  absl::Status AwaitGradientsBefore(uint32_t parameter);
  absl::Status TakeFailedPush();
  // Records a failure of `step`; returns `status`.
  absl::Status NoteFailure(uint64_t step, const absl::Status& status);
  absl::Status BeginAnew(uint64_t step);
  bool MayCopy(size_t piece, uint64_t step, uint32_t micro_step) const;
  // Copies the piece's part of a parameter's gradient, if any, into the
  // gradient area; returns its bytes.
  uint64_t PutGradient(size_t index, const void* gradient,
                       absl::Span<std::byte> area);
  void Mark(uint64_t step, uint32_t micro_step, uint32_t first, uint32_t count);
  void ForgetStaged();
  void DropFailedStep(uint64_t step, const absl::Status& status);
  absl::Status StartCommit();
  absl::Status CheckLoading() const;
  absl::Status CheckTakesBeginAt() const;
  // Says whether the load that was being finished is a part of what the job
  // was when the rank was attached again.
  bool IsLoadFinished(const Attached& attached,
                      std::optional<uint32_t> loads_before) const;
  absl::Status AppendRanges(const FetchTarget& target,
                            std::vector<FetchRange>* ranges) const;
  absl::Time StepDeadline() const {
    return absl::Now() + options_.step_timeout;
  }

  SessionOptions options_;
  std::string endpoint_;
  pid_t owner_pid_;
  std::unique_ptr<ChannelSetup> setup_;
  std::unique_ptr<Channel> channel_;
  bool attached_ = false;  // has been attached once
  uint32_t connections_ = 0;
  bool closed_ = false;

  uint64_t committed_step_ = 0;
  LossScalerState loss_scaler_;
  JobPhase phase_ = JobPhase::kEmpty;
  bool created_ = false;

  std::vector<PieceMark> marks_;  // one per piece
  uint64_t ended_ = 0;            // micro-steps ended by this session
  // The last micro-step that was pushed and whose gradients the engine may
  // still read.
  std::optional<MicroStep> unended_;
  // The micro-step whose end was declared over the present connection.
  std::optional<MicroStep> end_sent_;
  absl::Status refused_push_;  // why the open step was dropped
  // True when the wait for the answer to a commit was given up: the engine may
  // be applying the step with the gradients that are in the gradient area.
  bool commit_unresolved_ = false;
  // True when a push of the open step failed in transit.
  bool push_failed_ = false;
  bool loading_ = false;
  std::optional<LoadDigest> load_digest_;  // of LoadContent::kSame
  bool finishing_load_ = false;
  std::optional<BeginAt> begin_at_;  // of the load that is being finished
  bool takes_begin_at_ = false;      // the engine of the present connection
  uint32_t load_required_from_ = 0;
  bool speculates_ = false;
  // The step that this rank has begun, which the engine may take early; zero
  // once it was dropped.
  uint64_t begun_step_ = 0;
  // The step of which the engine takes nothing early, as far as is known.
  uint64_t settled_step_ = 0;
  bool has_views_ = false;
  std::optional<uint32_t> loads_finished_;  // of the job, as far as is known
  std::optional<CommitOptions> commit_;     // started, not answered
  bool commit_sent_ = false;                // sent over the present connection
  std::unique_ptr<ParameterDigests> digests_;
  std::unique_ptr<ParameterReader> reader_;
  absl::Duration update_time_;  // of the last step
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CLIENT_H_
