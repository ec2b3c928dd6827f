#ifndef OPTSTATE_SERVER_TRANSPORT_SESSION_HANDLER_H_
#define OPTSTATE_SERVER_TRANSPORT_SESSION_HANDLER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/area_parts.h"
#include "proto/types/optimizer.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"
#include "server/session/wire_counters.h"
#include "server/transport/gradient_pages.h"
#include "server/transport/peer.h"
#include "server/transport/session_table.h"
#include "server/transport/session_traffic.h"

namespace optstate::transport {

// Returns the verdict of this number, or for a number that is none Verdict{0},
// which the job refuses. Verdict has fewer bits than what peers send.
Verdict VerdictOf(int64_t number);

// Converts the message; the job checks the result.
StepVerdict VerdictFrom(const v1::DecideRequest& request);

// The facts about the job that a transport needs before it can bind a session
// to a rank: copies, because the job's own may change with the next
// registration.
struct AttachPlan {
  uint32_t rank = 0;
  std::string layout_hash;
  uint64_t group_count = 0;
  uint64_t gradient_area_bytes = 0;
  // Version of the client's segment, by the session protocol that the client
  // speaks.
  uint32_t client_segment_version = 0;
  uint64_t gradient_lead_bytes = 0;
  // True when the rank fetches parameters one by one; then there is no area,
  // and the next five fields are unset.
  bool fetches_parameters = false;
  uint64_t parameter_area_bytes = 0;
  UniqueFd parameters;  // see Job::OpenParameters
  UniqueFd run_stamps;  // see Job::OpenRunStamps
  uint64_t run_count = 0;
  std::vector<AreaPart> parts;  // parts of the parameter area, a chunk each
  uint64_t client_instance = 0;
  bool takes_notices = false;
  // True when the gradient area holds the gradients that this client instance
  // wrote for the previous engine.
  bool gradients_present = false;
  // See AttachSpec; set by the transport.
  UniqueFd gradient_segment;
  uint64_t gradient_offset_bytes = 0;
  uint64_t gradient_bytes_present = session::AttachSpec::kAllPresent;
  // True when pages with gradients may be missing; then `gradient_ends` says
  // which a push needs.
  bool pages_follow = false;
  std::vector<GradientEnd> gradient_ends;
};

// Enforces one session's rules, the same over every wire: the order of
// requests, and the checks before the Job is called. Transports turn bytes into
// these calls and the results into bytes.
//
// register* -> plan -> claim -> attach -> (push | commit | ...)* -> detach.
// Outside of attach and detach the calls in parentheses fail with
// FAILED_PRECONDITION; EndMicroStep(), Commit() and FinishLoad(), which have no
// result, need attached().
//
// Threads: one at a time. Destruction detaches.
// Size: one method for each request of a session.
class SessionHandler {
 public:
  struct Options {
    session::Job* job = nullptr;
    SessionTable* table = nullptr;
    std::string wire;  // "shm" or "grpc"
    // Largest data of one load or fetch.
    uint64_t transfer_bytes_max = 0;
    // Makes this session end soon; called from any thread.
    std::function<void()> interrupt;
    // Returns what waits in the session's queues; called from any thread while
    // the session has claimed a rank. Null: nobody is told.
    session::WireCounters::Queues queues = nullptr;
  };

  // `job`, `table` and `link` outlive the handler.
  SessionHandler(Options options, Peer peer, const PeerLink* link);
  ~SessionHandler();
  SessionHandler(const SessionHandler&) = delete;
  SessionHandler& operator=(const SessionHandler&) = delete;

  absl::StatusOr<v1::RegisterReply> Register(
      const v1::RegisterRequest& request);
  absl::StatusOr<AttachPlan> PlanAttach(const v1::AttachRequest& request);
  // Claims the rank for this session, waiting while the last step of a previous
  // session is being applied. ALREADY_EXISTS when another session has the rank.
  absl::Status Claim(const AttachPlan& plan);
  // Undoes Claim() when the attach that was to follow fails.
  void Unclaim();
  // Attaches a claimed rank, which stays claimed after an error.
  // `gradient_area` and `listener` stay valid until Detach() has returned.
  absl::StatusOr<v1::AttachReply> Attach(const AttachPlan& plan,
                                         const std::byte* gradient_area,
                                         session::SessionListener* listener);
  // Detaches the rank; afterwards the listener is not called any more.
  // Idempotent.
  void Detach(absl::string_view reason);
  // Detaches as the rank requests, or, when it is not attached, ends its former
  // session.
  void Leave(const v1::DetachRequest& request);

  // Counts the bytes and refusals of this session; for transports that count by
  // themselves.
  const SessionTraffic& traffic() const { return traffic_; }

  bool attached() const { return attached_; }
  uint32_t rank() const { return rank_; }
  // Returns whether an attached rank has no parameters mapped or sent.
  bool fetches_parameters() const { return fetches_parameters_; }
  // Returns whether an attached rank takes notices.
  bool takes_notices() const { return takes_notices_; }
  const Peer& peer() const { return peer_; }
  // The session's name in log lines.
  std::string Name() const;
  // Logs one line for a skipped step, however many ranks receive the outcome.
  void LogOutcome(const absl::Status& status,
                  const session::StepOutcome& outcome) const;

  absl::Status Push(uint64_t step, uint32_t micro_step,
                    uint32_t first_parameter, uint32_t parameter_count);
  // Always answered through the listener.
  // See Job. Returns false when no rank is attached.
  bool WorkAhead();
  void EndMicroStep(uint64_t request_id, uint64_t step, uint32_t micro_step);
  // Always answered through the listener.
  void Commit(uint64_t request_id, const session::CommitSpec& spec);
  absl::Status Abort(uint64_t step);
  // Always answered through the listener.
  void Decide(uint64_t request_id, const StepVerdict& verdict);
  // These two need no attached rank.
  absl::StatusOr<v1::PositionReply> Position() const;
  absl::StatusOr<v1::StepOutcome> DecideUnattached(
      const v1::DecideRequest& request) const;
  absl::Status BeginLoad();
  // `numel` elements (STEP_COUNT: parameters) are at the begin of `data`.
  absl::Status Load(uint32_t array, uint32_t parameter, uint64_t begin,
                    uint64_t numel, uint32_t dtype,
                    absl::Span<const std::byte> data);
  // Always answered through the listener.
  void FinishLoad(uint64_t request_id, const LoadEnd& end);
  // Fills `out` from its begin; `out` holds FetchBytes(), checked there.
  absl::StatusOr<uint64_t> Fetch(uint32_t array, uint32_t parameter,
                                 uint64_t begin, uint64_t numel,
                                 absl::Span<std::byte> out);
  absl::StatusOr<uint64_t> FetchBytes(uint32_t array, uint32_t parameter,
                                      uint64_t numel) const;
  // `kind`: a v1::ParameterHint::Kind.
  absl::Status HintParameters(uint32_t kind, uint32_t first, uint64_t count);
  absl::Status ReadParameters(uint64_t offset_bytes, absl::Span<std::byte> out);

  // Converts the groups of a commit message for the Job; the span is valid
  // until the next call. INVALID_ARGUMENT: more values than there can be
  // hyperparameters.
  absl::StatusOr<absl::Span<const Hyperparams>> Groups(
      const v1::CommitRequest& request);
  // CommitSpec's clips_with for the groups of the last call.
  absl::Span<const uint32_t> clips_with() const { return clips_with_; }

 private:
  void NoteTraffic(const AttachPlan& plan);
  absl::Status CheckAttached() const;
  absl::Status CheckTransfer(uint64_t bytes) const;

  const Options options_;
  const Peer peer_;
  const PeerLink* const link_;
  int64_t PeerPid() const;

  SessionTraffic traffic_;

  bool claimed_ = false;
  bool comes_back_ = false;  // as the client said when it registered
  uint64_t shape_ = 0;       // as the client was told then
  bool attached_ = false;
  bool leaves_ = false;  // as the rank has asked
  uint32_t rank_ = 0;
  bool takes_notices_ = false;
  bool fetches_parameters_ = false;
  std::vector<Hyperparams> groups_;
  std::vector<uint32_t> clips_with_;
  std::vector<std::byte> per_parameter_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SESSION_HANDLER_H_
