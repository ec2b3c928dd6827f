#ifndef OPTSTATE_CLIENT_CHANNEL_CHANNEL_H_
#define OPTSTATE_CLIENT_CHANNEL_CHANNEL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/session_types.h"
#include "client/views/device_parameters.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/layout.h"
#include "proto/types/load_end.h"
#include "proto/types/partition.h"
#include "proto/types/step_verdict.h"

namespace optstate::client {

// The description of itself that a rank sends to the engine at each connection.
struct ChannelSetup {
  std::string job;
  Layout layout;
  RankPartition partition;
  PartitionMode partition_mode = PartitionMode::kGreedy;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint32_t local_world_size = 1;
  bool accumulate = false;
  AccumulateDType accumulate_dtype = AccumulateDType::kFloat32;
  bool speculative = false;
  bool two_phase = false;
  bool ephemeral = false;
  bool extend = false;
  std::optional<LossScaler> loss_scaler;
  std::optional<LossScalerState> loss_scaler_state;
  StorageOptions storage;
  std::optional<AccessOptions> access = std::nullopt;
  bool fetches_parameters = false;
  // Identifies this session to the engine after a reconnection.
  uint64_t client_instance = 0;
  InterruptCheck interrupted = nullptr;
  NoticeSink notice = [](const std::string&) {};
};

// Pieces [first, +count) of the rank, whose gradients the engine has
// accumulated up to this micro-step.
struct StagedPieces {
  uint32_t first = 0;
  uint32_t count = 0;
  uint32_t micro_step = 0;
};

// The position of the job when the rank was attached.
struct Attached {
  uint64_t committed_step = 0;
  JobPhase phase = JobPhase::kEmpty;
  bool created = false;
  std::optional<Outcome> last_outcome;  // of committed_step
  LossScalerState loss_scaler;
  // See v1::AttachReply; empty when the daemon is too old to send the number.
  std::optional<uint32_t> loads_finished;
  uint32_t load_required_from = 0;
  bool speculates = false;
  // The engine has the gradients of the open step that it had answered pushes
  // of; see v1::AttachReply.
  bool gradients_present = false;
  bool takes_begin_at = false;  // see v1::AttachReply
  // Pieces of the next step that this session staged before it lost its
  // connection and that the engine still has; ascending and within the rank's
  // pieces.
  std::vector<StagedPieces> staged;
};

// A push: the pieces of parameters [first_parameter, +parameter_count) hold
// their gradients of `step`.
struct PushRange {
  uint64_t step = 0;
  uint32_t micro_step = 0;
  uint32_t first_parameter = 0;
  uint32_t parameter_count = 0;
  // The engine has their bytes already: they are not sent.
  bool is_there = false;
};

// A fetch: `out` receives elements [begin, ...) of an array in fp32
// (kParameter: in its dtype; per-parameter arrays: one number).
struct FetchRange {
  StateArray array = StateArray::kMaster;
  uint32_t parameter = 0;
  uint64_t begin = 0;
  uint64_t element_bytes = sizeof(float);
  absl::Span<std::byte> out;
};

// One rank's connection to the engine of its job: the verbs of
// optstate/v1/session.proto over one wire. Session uses a channel and adds what
// is the same for every wire: limits, splitting, reconnection, error context.
//
// Errors come from the engine or from the wire. connected() distinguishes a
// lost connection: once a verb has failed and connected() is false, the engine
// has dropped everything that this rank staged except Attached::staged, and
// Connect() may be tried again. A verb that reaches its deadline also drops the
// connection, because its answer could no longer be told from the answer to the
// next verb. ChannelSetup::interrupted ends Connect, Flush and WaitCommit with
// CANCELLED: the two waits keep the connection and the outstanding requests,
// and may be called again.
//
// The gradient and parameter areas stay at their addresses from the first
// Connect() until the channel is destroyed, through every reconnection.
//
// Threads: one at a time.
// Size: one method for each verb of the session protocol.
class Channel {
 public:
  virtual ~Channel() = default;

  // The name of the wire: "shm", "grpc" or "fake".
  virtual absl::string_view wire() const = 0;

  // Performs the handshake, registers and attaches; first drops an earlier
  // connection. With `must_exist`, a job that does not exist is NOT_FOUND
  // instead of being created.
  virtual absl::StatusOr<Attached> Connect(bool must_exist,
                                           absl::Time deadline) = 0;
  virtual bool connected() const = 0;
  // Detaches, so that the rank is free again when this returns. A transport
  // error: there was no connection any more.
  virtual absl::Status Disconnect() = 0;
  // Tells the engine that this session does not come back. Is called without a
  // connection, possibly after the engine was lost, and makes a connection of
  // its own.
  virtual absl::Status Farewell(absl::Time deadline) = 0;
  // Drops the connection without a message to the engine and closes this
  // process's copy of the socket. For a forked child, whose parent goes on
  // using the connection.
  virtual void Abandon() = 0;

  virtual absl::Span<std::byte> gradient_area() = 0;
  // Waits until the first `bytes` of the gradient area have their memory; they
  // must not be written before. RESOURCE_EXHAUSTED: there is none; CANCELLED:
  // interrupted. Costs next to nothing once the memory is there.
  virtual absl::Status AwaitGradientArea(uint64_t /*bytes*/) {
    return absl::OkStatus();
  }
  // Says whether ReleaseGradients() gives memory back.
  virtual bool releases_gradients() const { return false; }
  // Gives back memory of bytes [begin, end) of the gradient area, whose pushes
  // are answered; they read as zeros, or as they were.
  virtual void ReleaseGradients(uint64_t /*begin*/, uint64_t /*end*/) {}
  // The parameters of the committed step after Connect, WaitCommit and
  // FinishLoad; empty with ChannelSetup::fetches_parameters.
  virtual absl::Span<const std::byte> parameter_area() const = 0;
  // The file of which the area is a mapping; -1: there is no file. The file
  // changes when the session reconnects.
  virtual int parameter_file() const { return -1; }
  // DATA_LOSS: another process has cut the file short, and the area has zeros
  // where parameters were. Costs next to nothing.
  virtual absl::Status CheckParameterArea() const { return absl::OkStatus(); }

  // Submits a push; waits only while the wire is full. The result of the push
  // is known after Flush, see failed_push().
  virtual absl::Status Push(const PushRange& range, absl::Time deadline) = 0;
  // Waits until the engine has answered every push.
  virtual absl::Status Flush(absl::Time deadline) = 0;
  // Starts a commit, which is answered when every rank has committed. Push,
  // Flush and Abort may be called in between; a second commit may not.
  virtual absl::Status StartCommit(const CommitOptions& options,
                                   absl::Time deadline) = 0;
  // A callback of WaitCommit. Wires that have run_stamps() call it repeatedly;
  // it returns the longest time until the next call.
  using Meanwhile = absl::FunctionRef<absl::Duration()>;
  virtual absl::StatusOr<Outcome> WaitCommit(absl::Time deadline,
                                             Meanwhile meanwhile) = 0;
  // The stamps, by run of the layout: the last step whose values the run has in
  // the parameter area (loaded with acquire). Null when the wire or the engine
  // does not report runs before the commit is answered.
  virtual const std::atomic<uint64_t>* run_stamps() const { return nullptr; }
  // Returns whether some parameters in the area belong to a step whose commit
  // is not answered yet, or never was, on a wire that cannot say which
  // parameters.
  virtual bool has_mixed_parameters() const { return false; }
  virtual absl::Status Abort(uint64_t step, absl::Time deadline) = 0;
  // Asks for the memory of a device in which the engine keeps parameters; see
  // v1::ShareParametersRequest, and its reply for the errors. UNIMPLEMENTED:
  // the wire or the engine has no such memory.
  virtual absl::StatusOr<DeviceParameters::Shared> ShareParameters(
      absl::string_view /*device*/, absl::Time /*deadline*/) {
    return absl::UnimplementedError(
        absl::StrCat("over ", std::string(wire()), " parameters are copied"));
  }
  // Offers memory of a device that has the rank's gradients, by the fds of its
  // table and of the memory, until the connection ends; -1, and no bytes: what
  // was offered is given up. See v1::ShareGradientsRequest, and its reply for
  // the errors. UNIMPLEMENTED: the wire or the engine takes no such memory.
  struct GradientsOffer {
    int table = -1;
    int memory = -1;
    uint64_t memory_bytes = 0;
  };
  virtual absl::Status ShareGradients(absl::string_view /*device*/,
                                      const GradientsOffer& /*offer*/,
                                      absl::Time /*deadline*/) {
    return absl::UnimplementedError(
        absl::StrCat("over ", std::string(wire()), " gradients are copied"));
  }

  // Says what becomes of a prepared step; WaitCommit waits for the outcome.
  virtual absl::Status StartDecision(const StepVerdict& verdict,
                                     absl::Time deadline) = 0;
  // Returns whether WaitCommit has something to wait for.
  virtual bool has_outstanding_commit() const = 0;
  // Makes one request that needs no rank, over a connection of its own. Is
  // called without a connection. UNIMPLEMENTED: the daemon does not know it.
  virtual absl::StatusOr<v1::SessionReply> Ask(
      const v1::SessionRequest& request, absl::Time deadline) = 0;

  // The largest data of one Load or FetchRange, in bytes.
  virtual uint64_t transfer_bytes_max() const = 0;
  virtual absl::Status BeginLoad(absl::Time deadline) = 0;
  // Loads `data`, which holds elements [begin, ...) of the array in `dtype`
  // (step count: int64, and dtype is ignored); the caller may reuse it when
  // this returns. An error of the engine shows here, at a later Load, or at
  // FinishLoad.
  virtual absl::Status Load(StateArray array, uint32_t parameter,
                            uint64_t begin, DType dtype,
                            absl::Span<const std::byte> data,
                            absl::Time deadline) = 0;
  // Finishes the load. With LoadEnd::begin_at: of an engine that
  // takes_begin_at.
  virtual absl::Status FinishLoad(const LoadEnd& end, absl::Time deadline) = 0;
  // Fills every range; returns the step that the values belong to.
  virtual absl::StatusOr<uint64_t> Fetch(absl::Span<const FetchRange> ranges,
                                         absl::Time deadline) = 0;
  // See v1::ParameterHint.
  virtual absl::Status HintParameters(ParameterHint hint, uint32_t first,
                                      uint32_t count, absl::Time deadline) = 0;

  // The first push since ClearFailedPush() that the engine refused.
  struct FailedPush {
    uint64_t step = 0;
    absl::Status status;
  };
  const std::optional<FailedPush>& failed_push() const { return failed_push_; }
  void ClearFailedPush() { failed_push_.reset(); }

 protected:
  void NoteFailedPush(uint64_t step, absl::Status status) {
    if (!failed_push_) failed_push_ = FailedPush{step, std::move(status)};
  }

 private:
  std::optional<FailedPush> failed_push_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_CHANNEL_H_
