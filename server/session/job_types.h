#ifndef OPTSTATE_SERVER_SESSION_JOB_TYPES_H_
#define OPTSTATE_SERVER_SESSION_JOB_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/types.pb.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/load_end.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "proto/types/step_commit.h"
#include "proto/types/step_outcome.h"
#include "proto/types/step_verdict.h"
#include "proto/types/unique_fd.h"
#include "server/session/ranks/former_rank.h"

// The plain data that a Job takes and returns.

namespace optstate::session {

using optstate::StepOutcome;

// Receives the answers that come later than the call. There is one per session,
// and the listener outlives the session.
//
// Threads: called from any thread, one call at a time for one listener, also
// from within the Commit, EndMicroStep or FinishLoad that it answers, and with
// the job's lock held: a listener must not call the Job or block on a peer.
class SessionListener {
 public:
  virtual ~SessionListener() = default;
  virtual void OnStepDone(uint64_t request_id, const absl::Status& status,
                          const StepOutcome& outcome) = 0;
  // Says, while an answer is outstanding, for what the rank is waiting.
  virtual void OnNotice(absl::string_view /*text*/) {}
};

// A hint about parameters that a rank fetches; values equal those of
// v1::ParameterHint::Kind.
enum class ParameterHint : uint8_t {
  kPrefetch = 1,
  kRelease = 2,
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
  std::optional<v1::LossScalerState> loss_scaler_state;  // see above
  v1::StorageSettings storage;                           // see above
  bool speculative = false;                              // see above
};

struct RegisterResult {
  std::string layout_hash;
  uint64_t committed_step = 0;
  v1::JobPhase phase = v1::JOB_PHASE_EMPTY;
  bool created = false;
  // Number of the job's shape in this engine; it changes when the layout,
  // partition, world size or another setting of the job changes. Never 0.
  uint64_t shape = 0;
  v1::StorageSettings storage;  // of the job
};

struct AttachSpec {
  uint32_t rank = 0;
  std::string layout_hash;
  // The shape returned by Register: FAILED_PRECONDITION when the job has
  // another one by now. 0: not given.
  uint64_t shape = 0;
  // The rank's gradients: partition(rank).gradient_area_bytes bytes, valid
  // until Detach returns. The area is only read, and its content is arithmetic
  // input alone, never a size or an index: the peer may be writing.
  const std::byte* gradient_area = nullptr;
  // Size of the area; FAILED_PRECONDITION when the rank's partition needs more.
  uint64_t gradient_area_bytes = 0;
  SessionListener* listener = nullptr;
  // See v1::AttachRequest.
  uint64_t client_instance = 0;
  // The rank was attached before, to this engine or another:
  // FAILED_PRECONDITION when another instance has attached since, or the job is
  // another one.
  bool comes_back = false;
  // The area still holds the gradients that this instance wrote for the
  // previous engine; if false, it holds them once the rank has pushed again and
  // committed.
  bool gradients_present = false;
  // The memory of the gradients, for the job's GradientKeeper, when the rank
  // owns it; the fd stays the caller's.
  int gradient_segment = -1;
  uint64_t gradient_offset_bytes = 0;  // where in the segment they begin
  // The part of the area, from its begin, that is known to be memory: reading
  // takes none. Before it pushes what lies behind, the caller checks that.
  static constexpr uint64_t kAllPresent = std::numeric_limits<uint64_t>::max();
  uint64_t gradient_bytes_present = kAllPresent;
  int64_t pid = 0;      // from the rank, if the kernel gives none; for display
  RankProcess process;  // its end ends the session
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

// How far a job is; see v1::PositionReply.
struct JobPosition {
  uint64_t committed_step = 0;
  v1::JobPhase phase = v1::JOB_PHASE_EMPTY;
  std::optional<StepOutcome> last_outcome;
  std::optional<StepOutcome> prepared;
  bool prepared_is_clipped = false;  // by the norm of all nodes
  bool prepared_awaits_norm = false;
  uint32_t loads_finished = 0;
  uint64_t durable_step = 0;
};

// The files by which a rank copies parameters from a device; see
// v1::ShareParametersReply.
struct DeviceParameters {
  UniqueFd table;
  UniqueFd memory;
  uint32_t device_index = 0;
  uint64_t memory_bytes = 0;
};

// The files by which a device takes a rank's gradients from the rank's memory
// there; see v1::ShareGradientsRequest.
struct DeviceGradients {
  UniqueFd table;
  UniqueFd memory;
  uint64_t memory_bytes = 0;  // 0: the former are given up
};

// Its spans need to be valid during the call alone.
using CommitSpec =
    StepCommit<absl::Span<const Hyperparams>, absl::Span<const uint32_t>>;

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_TYPES_H_
