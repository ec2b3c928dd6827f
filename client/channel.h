#ifndef OPTSTATE_CLIENT_CHANNEL_H_
#define OPTSTATE_CLIENT_CHANNEL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/session_types.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"

namespace optstate::client {

// What a rank tells the engine each time that it connects.
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
  bool ephemeral = false;
  bool extend = false;
  std::optional<LossScaler> loss_scaler;
  std::optional<LossScalerState> loss_scaler_state;
  // Tells the engine that it is still this session, after a reconnection.
  uint64_t client_instance = 0;
  InterruptCheck interrupted = nullptr;
  NoticeSink notice = [](const std::string&) {};
};

// Pieces [first, +count) of the rank, accumulated up to this micro-step.
struct StagedPieces {
  uint32_t first = 0;
  uint32_t count = 0;
  uint32_t micro_step = 0;
};

// Where the job stood when the rank was attached.
struct Attached {
  uint64_t committed_step = 0;
  JobPhase phase = JobPhase::kEmpty;
  bool created = false;
  std::optional<Outcome> last_outcome;  // of committed_step
  LossScalerState loss_scaler;
  // See v1::AttachReply; none of an older daemon.
  std::optional<uint32_t> loads_finished;
  uint32_t load_required_from = 0;
  bool speculates = false;
  // What this session staged of the next step before it lost its connection,
  // as far as it is there still; ascending and within the rank's pieces.
  std::vector<StagedPieces> staged;
};

// Pieces of parameters [first_parameter, +parameter_count) hold their
// gradients of `step`.
struct PushRange {
  uint64_t step = 0;
  uint32_t micro_step = 0;
  uint32_t first_parameter = 0;
  uint32_t parameter_count = 0;
};

// `out` is to be filled with elements [begin, ...) of an array in fp32
// (per-parameter arrays: one number).
struct FetchRange {
  StateArray array = StateArray::kMaster;
  uint32_t parameter = 0;
  uint64_t begin = 0;
  absl::Span<std::byte> out;
};

// One rank's connection to the engine of its job: the verbs of
// optstate/v1/session.proto over one wire. Session stands on it and adds what
// is the same for every wire: limits, splitting, reconnection, error context.
//
// Errors are the engine's own, or the wire's. connected() tells a lost
// connection apart: once a verb has failed and connected() is false, the engine
// has dropped what this rank staged, but for Attached::staged, and Connect()
// may be tried again. A verb that reaches its deadline drops the connection
// too, because its answer could no longer be told from that of the next one.
// ChannelSetup::interrupted ends Connect, Flush and WaitCommit with CANCELLED:
// the two waits keep the connection and what is out, and may be called again.
//
// The gradient and parameter areas stay at their addresses from the first
// Connect() until the channel is destroyed, through every reconnection.
//
// Threads: one at a time.
class Channel {
 public:
  virtual ~Channel() = default;

  // "shm", "grpc" or "fake".
  virtual absl::string_view wire() const = 0;

  // Handshake, register, attach. Drops an earlier connection first.
  // `must_exist`: NOT_FOUND when there is no such job, instead of a new one.
  virtual absl::StatusOr<Attached> Connect(bool must_exist,
                                           absl::Time deadline) = 0;
  virtual bool connected() const = 0;
  // Detaches, so that the rank is free again when it returns. A transport
  // error: there was no connection any more.
  virtual absl::Status Disconnect() = 0;
  // Without a connection: says to the engine, over one of its own, that this
  // session, which may have lost the engine before, does not come back.
  virtual absl::Status Farewell(absl::Time deadline) = 0;
  // Forgets the connection without a word to the engine, and closes this
  // process's copy of its socket: for a forked child, whose parent goes on
  // using it.
  virtual void Abandon() = 0;

  virtual absl::Span<std::byte> gradient_area() = 0;
  // Holds the parameters of the committed step after Connect, WaitCommit and
  // FinishLoad.
  virtual absl::Span<const std::byte> parameter_area() const = 0;
  // The file that the area is a mapping of; -1: it is none. It changes when the
  // session connects anew.
  virtual int parameter_file() const { return -1; }

  // Submits; waits only while the wire is full. What becomes of it is known
  // after Flush, see failed_push().
  virtual absl::Status Push(const PushRange& range, absl::Time deadline) = 0;
  // Waits until the engine has answered every push.
  virtual absl::Status Flush(absl::Time deadline) = 0;
  // A commit is answered when every rank has committed. Push, Flush and Abort
  // may be called in between; no second commit.
  virtual absl::Status StartCommit(const CommitOptions& options,
                                   absl::Time deadline) = 0;
  // `meanwhile` is called now and then, after at most as long as it last
  // returned, by wires that have run_stamps().
  using Meanwhile = absl::FunctionRef<absl::Duration()>;
  virtual absl::StatusOr<Outcome> WaitCommit(absl::Time deadline,
                                             Meanwhile meanwhile) = 0;
  // By run of the layout: the last step whose values the run has in the
  // parameter area (loaded with acquire). Null when the wire, or the engine,
  // does not tell before the commit is answered.
  virtual const std::atomic<uint64_t>* run_stamps() const { return nullptr; }
  // Whether some parameters in the area are of the step whose commit is not
  // answered yet, or never was, where nothing tells which.
  virtual bool has_mixed_parameters() const { return false; }
  virtual absl::Status Abort(uint64_t step, absl::Time deadline) = 0;

  // Largest data of one Load or FetchRange.
  virtual uint64_t transfer_bytes_max() const = 0;
  virtual absl::Status BeginLoad(absl::Time deadline) = 0;
  // `data` holds elements [begin, ...) of the array in `dtype` (step count:
  // int64, and dtype is ignored); it is the caller's again when this returns.
  // An error of the engine shows here, at a later Load, or at FinishLoad.
  virtual absl::Status Load(StateArray array, uint32_t parameter,
                            uint64_t begin, DType dtype,
                            absl::Span<const std::byte> data,
                            absl::Time deadline) = 0;
  // content_digest: see v1::FinishLoadRequest.
  virtual absl::Status FinishLoad(uint64_t content_digest,
                                  absl::Time deadline) = 0;
  // Fills every range; returns the step that they belong to.
  virtual absl::StatusOr<uint64_t> Fetch(absl::Span<const FetchRange> ranges,
                                         absl::Time deadline) = 0;

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

#endif  // OPTSTATE_CLIENT_CHANNEL_H_
