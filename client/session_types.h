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
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"

namespace optstate::client {

// Values of the enums below equal those of optstate.v1.

// One array of a job's state.
enum class StateArray : uint16_t {
  kMaster = 1,
  // Those of OptimizerInfo::state_arrays.
  kState0 = 2,
  kState1 = 3,
  kState2 = 4,
  kStepCount = 5,  // one int64 per parameter
  kScalar = 6,     // one double per parameter, see OptimizerInfo::scalar
  // One double per parameter, only to be fetched: the L2 norm of its gradient
  // in the last committed step, unscaled and not clipped; -1: it had none.
  kGradientNorm = 7,
};

constexpr bool IsValidStateArray(uint32_t value) {
  return value >= 1 && value <= 7;
}

// One number of 8 bytes per parameter, not one per element.
constexpr bool IsPerParameter(StateArray array) {
  return array == StateArray::kStepCount || array == StateArray::kScalar ||
         array == StateArray::kGradientNorm;
}

enum class JobPhase : uint8_t {
  kEmpty = 1,    // no layout registered yet
  kLoading = 2,  // parameters are to be loaded before the first step
  kReady = 3,
  kFailed = 4,  // the state is kept; errors say what happened
  // The engine died in a step and finishes it once all ranks are back.
  kRecovering = 5,
};

// The daemon checks the values (INVALID_ARGUMENT in torch.optim's words).
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

// What a dynamic LossScaler has come to; see v1::LossScalerState.
struct LossScalerState {
  double loss_scale = 0;  // for the next step; 0: no LossScaler
  uint32_t good_steps = 0;
  uint32_t hysteresis_left = 0;
};

// How a step is to be taken. Every rank commits with equal content.
struct CommitOptions {
  uint64_t step = 0;                // committed_step + 1
  std::vector<Hyperparams> groups;  // one per group of the layout
  // Of each group, see v1::GroupHyperparams; empty: all are clipped alone.
  std::vector<uint32_t> clips_with;
  double grad_scale = 1;   // gradients are divided by it
  double max_norm = 0;     // of all gradients together; 0: no clipping
  double max_value = 0;    // of each gradient; 0: no clipping
  double norm_type = 2;    // of max_norm: 1, 2 or infinity
  bool found_inf = false;  // this rank knows: skip the step
};

// Whole parameters, each to contiguous memory of its dtype.
struct ParameterTargets {
  absl::Span<const uint32_t> parameters;
  absl::Span<void* const> destinations;
};

// What became of a step.
struct Outcome {
  uint64_t step = 0;
  bool applied = false;    // false: skipped, see found_inf
  bool found_inf = false;  // some gradient was NaN or infinite
  // L2 norm of all unscaled gradients of the step, before clipping.
  double gradient_norm = 0;
  double clip_coefficient = 1;  // 1 when not clipped
  uint64_t update_ns = 0;       // time of the update pass in the engine
  double loss_scale = 0;        // for the next step; 0: no LossScaler
  // Of a dynamic LossScaler, as in LossScalerState; 0: of an older daemon.
  uint32_t good_steps = 0;
  uint32_t hysteresis_left = 0;
};

// Whether a wait is to end. Asked by the thread that waits, every 50 ms or so.
using InterruptCheck = std::function<bool()>;

// Hears what a rank waits for, within the call that waits: "rank 1 lost at step
// 7, waiting for its return".
using NoticeSink = std::function<void(const std::string& text)>;

// How changes of the trainer's copies of parameters are found that nothing else
// tells of.
enum class ChangeDetection : uint8_t {
  kOff = 0,
  kSample = 1,  // one line of 64 bytes of each 4 KiB, by turns
  kExact = 2,
};

// Who opens a session, of which job, and where.
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
  // A parameter may be pushed once per micro-step of a step; the daemon keeps
  // their sums, in this dtype.
  bool accumulate = false;
  AccumulateDType accumulate_dtype = AccumulateDType::kFloat32;
  ChangeDetection change_detection = ChangeDetection::kOff;
  bool ephemeral = false;  // delete the job when its last session ends
  bool extend = false;     // the layout may add groups to the registered one
  std::optional<LossScaler> loss_scaler;  // none: the trainer scales
  // Where loss_scaler begins in a new job; none: at init_scale.
  std::optional<LossScalerState> loss_scaler_state;
  // For the connection, and for how long a lost engine is awaited.
  absl::Duration connect_timeout = absl::Seconds(30);
  // For one step, waiting for the other ranks included.
  absl::Duration step_timeout = absl::Seconds(1800);
  // optstated for "embedded". Empty: $OPTSTATE_DAEMON, else beside this
  // library, else on PATH.
  std::string daemon_path;
  // Ends waits for other ranks and for a daemon with CANCELLED; null: nothing
  // does. Not asked during a load, which would leave the job unusable.
  InterruptCheck interrupted = nullptr;
  NoticeSink notice = nullptr;  // null: a line on stderr
};

// What the loads of the ranks of a job have in common.
enum class LoadContent {
  kOwn,   // nothing: each may leave out what it does not own
  kSame,  // all
};

struct SessionInfo {
  uint64_t committed_step = 0;
  JobPhase phase = JobPhase::kEmpty;
  LossScalerState loss_scaler;
  uint32_t load_required_from = 0;  // at attaching; see v1::AttachReply
  bool created = false;             // this session's registration made the job
  std::string endpoint;  // resolved; for "embedded" the unix: one of the child
  std::string wire;      // "shm" or "grpc"
  bool commit_open = false;  // started, not answered: CommitWait is due
};

// Where a whole array of one parameter is to be copied: numel fp32 elements
// (per-parameter arrays: one number).
struct FetchTarget {
  StateArray array = StateArray::kMaster;
  uint32_t parameter = 0;
  absl::Span<std::byte> out;
};

// A piece of a parameter that this rank owns, and where its gradient goes.
struct GradientPiece {
  uint32_t parameter = 0;
  uint64_t begin = 0;  // element of the parameter
  uint64_t numel = 0;
  DType dtype = DType::kFloat32;   // of the gradient
  absl::Span<std::byte> gradient;  // numel elements, to be written
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_SESSION_TYPES_H_
