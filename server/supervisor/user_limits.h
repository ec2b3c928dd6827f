#ifndef OPTSTATE_SERVER_SUPERVISOR_USER_LIMITS_H_
#define OPTSTATE_SERVER_SUPERVISOR_USER_LIMITS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"
#include "server/accept/peer_credentials.h"

namespace optstate::supervisor {

// Numbers of jobs or of sessions: those of the job's owner, and all.
struct Counts {
  size_t of_user = 0;
  size_t all = 0;
};

// Checks whether `peer` may have one more. RESOURCE_EXHAUSTED names the limit
// of `limits` that is reached and what to do. Only the limits of all apply to
// operators; other callers leave them operator_reserve_percent.
absl::Status CheckJobCount(const v1::Limits& limits,
                           const accept::PeerCredentials& peer,
                           const Counts& jobs);
absl::Status CheckSessionCount(const v1::Limits& limits,
                               const accept::PeerCredentials& peer,
                               const Counts& sessions);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_USER_LIMITS_H_
