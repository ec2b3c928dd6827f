#ifndef OPTSTATE_CLIENT_SESSION_TYPES_H_
#define OPTSTATE_CLIENT_SESSION_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/types/accumulation.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/load_end.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "proto/types/step_commit.h"
#include "proto/types/step_outcome.h"

namespace optstate::client {

// Values of the enums below equal those of optstate.v1.

// One array of a job's state.
enum class StateArray : uint16_t {
  kMaster = 1,
  // The arrays of OptimizerInfo::state_arrays.
  kState0 = 2,
  kState1 = 3,
  kState2 = 4,
  kStepCount = 5,  // one int64 per parameter
  kScalar = 6,     // one double per parameter, see OptimizerInfo::scalar
  // One double per parameter, which can only be fetched: the L2 norm of its
  // gradient in the last committed step, unscaled and not clipped; -1: it had
  // none.
  kGradientNorm = 7,
  // The parameter itself, in its own dtype, which can only be fetched: masters
  // are loaded.
  kParameter = 8,
  // One double per parameter, which can only be fetched: the sum of squares of
  // its gradient in the prepared step, as it arrived; -1: it has none.
  kPreparedSum = 9,
};

constexpr bool IsValidStateArray(uint32_t value) {
  return value >= 1 && value <= 9;
}

// Returns whether the array has one number of 8 bytes per parameter, not one
// per element.
constexpr bool IsPerParameter(StateArray array) {
  return array == StateArray::kStepCount || array == StateArray::kScalar ||
         array == StateArray::kGradientNorm ||
         array == StateArray::kPreparedSum;
}

enum class JobPhase : uint8_t {
  kEmpty = 1,    // no layout registered yet
  kLoading = 2,  // parameters are to be loaded before the first step
  kReady = 3,
  kFailed = 4,  // the state is kept; errors say what happened
  // The engine died in a step and finishes it once all ranks are back.
  kRecovering = 5,
};

// Checked by the daemon (INVALID_ARGUMENT in torch.optim's words).
using optstate::Hyperparams;

// Dynamic loss scaling in the daemon; see v1::LossScaler.
struct LossScaler {
  bool dynamic = true;
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  uint32_t growth_interval = 2000;
  uint32_t hysteresis = 1;
  double min_scale = 0;
};

// The state of a dynamic LossScaler; see v1::LossScalerState.
struct LossScalerState {
  double loss_scale = 0;  // for the next step; 0: no LossScaler
  uint32_t good_steps = 0;
  uint32_t hysteresis_left = 0;
};

// The settings of a step. Every rank commits with equal content.
using CommitOptions =
    StepCommit<std::vector<Hyperparams>, std::vector<uint32_t>>;

// Receives elements [begin, end) of a parameter, within the call that waits.
using PartSink =
    std::function<void(uint32_t parameter, uint64_t begin, uint64_t end)>;

// Whole parameters, each with contiguous memory of its dtype.
struct ParameterTargets {
  absl::Span<const uint32_t> parameters;
  absl::Span<void* const> destinations;
  // Told of each part of a parameter whose destination is null, once its values
  // are in Session::parameter(): the caller copies them, such as to a device.
  PartSink ready = nullptr;
};

// The result of a step.
using Outcome = StepOutcome;

// Returns whether a wait is to end. The waiting thread calls it about every 50
// ms.
using InterruptCheck = std::function<bool()>;

// Receives a text about what a rank waits for, within the waiting call: "rank 1
// lost at step 7, waiting for its return".
using NoticeSink = std::function<void(const std::string& text)>;

// How to find changes of the trainer's copies of parameters that leave no other
// trace.
enum class ChangeDetection : uint8_t {
  kOff = 0,
  kSample = 1,  // one line of 64 bytes of each 4 KiB, in turn
  kExact = 2,
};

// Where a new job's state lives; see v1.StorageSettings. For a job that is
// there, what is set must be what it has.
enum class Placement : uint8_t {
  kUnset = 0,  // host
  kHost = 1,
  kNvme = 2,
  kAuto = 3,
};
enum class Durability : uint8_t {
  kUnset = 0,  // none
  kNone = 1,
  kStep = 2,
  kEvery = 3,
  kInterval = 4,
};
struct StorageOptions {
  Placement placement = Placement::kUnset;
  Durability durability = Durability::kUnset;
  uint64_t host_budget_bytes = 0;      // of kNvme; 0: the node's default
  uint64_t sub_group_elements = 0;     // a multiple of 4096; 0: likewise
  uint32_t durability_steps = 0;       // of kEvery
  absl::Duration durability_interval;  // of kInterval
  // Keeps the parameters on disk too, with kNvme and kAuto. Only sessions with
  // `fetches_parameters` can use such a job.
  bool parameters_on_disk = false;
  // The daemon's memory for them; 0: its default.
  uint64_t parameter_cache_bytes = 0;
  // The fraction of elements, from 0 to 1, that the CPU updates; the daemon's
  // devices update the others. Unset: 1 for a new job.
  std::optional<double> offload_fraction;
  // The memory of each of these devices for records that stay there from step
  // to step; 0: none stay.
  uint64_t device_budget_bytes = 0;
};

// The users of a new job besides its owner; see v1::JobAccess. A job that is
// there keeps its own.
struct AccessOptions {
  std::string group;        // whose members may do what the owner may
  bool is_private = false;  // for others there is no such job
  std::vector<std::string> readers = {};  // users, and groups as "@NAME"

  bool operator==(const AccessOptions&) const = default;
};

// A hint about parameters that a session fetches; see v1::ParameterHint.
enum class ParameterHint : uint8_t {
  kPrefetch = 1,
  kRelease = 2,
};

// The rank that opens a session, its job, and the daemon's endpoint.
struct SessionOptions {
  // "unix:PATH", "grpc:HOST:PORT", "grpc:unix:PATH" or "embedded". Empty:
  // $OPTSTATE_ENDPOINT, else the node's daemon when its socket is there, else
  // "embedded".
  std::string endpoint;
  std::string job;
  LayoutSpec layout;
  PartitionMode partition = PartitionMode::kGreedy;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint32_t local_world_size = 0;  // 0: world_size
  // Allows one push of a parameter per micro-step of a step; the daemon keeps
  // the sums, in this dtype.
  bool accumulate = false;
  AccumulateDType accumulate_dtype = AccumulateDType::kFloat32;
  ChangeDetection change_detection = ChangeDetection::kOff;
  // Lets the daemon begin a step as gradients are pushed; see
  // v1.RegisterRequest. Parameters must not be read while a step is open.
  bool speculative = false;
  // Commits prepare the step alone: their outcomes are `prepared`, and Decide()
  // takes it, as all nodes of the job agreed.
  bool two_phase = false;
  bool ephemeral = false;  // delete the job when its last session ends
  bool extend = false;     // the layout may add groups to the registered one
  std::optional<LossScaler> loss_scaler;  // none: the trainer scales
  // The initial state of loss_scaler in a new job; none: at init_scale.
  std::optional<LossScalerState> loss_scaler_state;
  StorageOptions storage;
  // None: all who may look at jobs may look at a new one. Not for "embedded".
  std::optional<AccessOptions> access;
  // Parameters are fetched one by one (StateArray::kParameter) and nowhere in
  // this process whole: Session::parameter() has none. Over gRPC the memory of
  // a gradient is given back once the daemon has it.
  bool fetches_parameters = false;
  // The timeout of the connection and of the wait for a lost engine.
  absl::Duration connect_timeout = absl::Seconds(30);
  // The timeout of one step, including the wait for the other ranks.
  absl::Duration step_timeout = absl::Seconds(1800);
  // The path of optstated for "embedded". Empty: $OPTSTATE_DAEMON, else beside
  // this library, else on PATH.
  std::string daemon_path;
  // Ends waits for other ranks and for a daemon with CANCELLED; null: waits are
  // not interrupted. Not called during a load, which would leave the job
  // unusable.
  InterruptCheck interrupted = nullptr;
  NoticeSink notice = nullptr;  // null: a line on stderr
};

// The content that the loads of a job's ranks have in common.
enum class LoadContent {
  kOwn,   // nothing: each rank may omit what it does not own
  kSame,  // everything
};

struct SessionInfo {
  uint64_t committed_step = 0;
  JobPhase phase = JobPhase::kEmpty;
  LossScalerState loss_scaler;
  uint32_t load_required_from = 0;  // when attached; see v1::AttachReply
  bool created = false;             // this session's registration made the job
  std::string endpoint;  // resolved; for "embedded" the unix: one of the child
  std::string wire;      // "shm" or "grpc"
  bool commit_open = false;  // started, not answered: CommitWait is due
  // How often the session has attached. When the number changes, the memory of
  // Session::parameter() may be another at the same address, which who has
  // pinned it for a device pins anew.
  uint32_t connections = 0;
};

// The step at which a new job begins, see Session::FinishLoad.
using optstate::BeginAt;

// A destination for a whole array of one parameter: numel fp32 elements
// (per-parameter arrays: one number).
struct FetchTarget {
  StateArray array = StateArray::kMaster;
  uint32_t parameter = 0;
  absl::Span<std::byte> out;
};

// A piece of a parameter that this rank owns, and the memory for its gradient.
struct GradientPiece {
  uint32_t parameter = 0;
  uint64_t begin = 0;  // element of the parameter
  uint64_t numel = 0;
  DType dtype = DType::kFloat32;  // of the gradient
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_SESSION_TYPES_H_
