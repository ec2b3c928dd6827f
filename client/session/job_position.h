#ifndef OPTSTATE_CLIENT_SESSION_JOB_POSITION_H_
#define OPTSTATE_CLIENT_SESSION_JOB_POSITION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session_types.h"
#include "proto/types/step_verdict.h"

namespace optstate::client {

// A job, and how it is asked; see SessionOptions.
struct JobAddress {
  std::string endpoint;
  std::string job;
  absl::Duration timeout = absl::Seconds(30);
  std::string daemon_path;
  InterruptCheck interrupted = nullptr;
};

// How far a job is; see v1.PositionReply.
struct JobPosition {
  uint64_t committed_step = 0;
  JobPhase phase = JobPhase::kEmpty;
  std::optional<Outcome> last_outcome;
  std::optional<Outcome> prepared;
  bool prepared_is_clipped = false;  // by the norm of all nodes
  bool prepared_awaits_norm = false;
  uint32_t loads_finished = 0;
  uint64_t durable_step = 0;
};

// Asks how far a job is, without a rank of it. NOT_FOUND: there is none;
// UNIMPLEMENTED: the daemon does not know steps of two phases; UNAVAILABLE: a
// step in which the engine died waits for its gradients, or no daemon was
// reached within the timeout.
absl::StatusOr<JobPosition> FindPosition(const JobAddress& address);

// Brings what all nodes decided about a step that the job has prepared; see
// Session::Decide.
absl::StatusOr<Outcome> BringVerdict(const JobAddress& address,
                                     const StepVerdict& verdict);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_SESSION_JOB_POSITION_H_
