#ifndef OPTSTATE_SERVER_SUPERVISOR_USER_LIMITS_H_
#define OPTSTATE_SERVER_SUPERVISOR_USER_LIMITS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"
#include "server/accept/peer_credentials.h"
#include "server/access/quotas.h"

namespace optstate::supervisor {

// Numbers of jobs or of sessions: those of the job's owner, all, and those of
// the members of each group of the owner's bounds, in their order.
struct Counts {
  size_t of_user = 0;
  size_t all = 0;
  std::vector<uint64_t> of_groups = {};
};

// Returns whether the peer is root or the daemon's own user, whom no quota and
// no limit of users concerns, neither of numbers nor of bytes. Other operators,
// of access.operator_groups or by an identity, are users as all others here.
bool HasNoQuota(const accept::PeerCredentials& peer);

// Checks whether `peer` may have one more, for a job whose owner has these
// bounds. RESOURCE_EXHAUSTED names the limit of `limits`, or the quota, that is
// reached and what to do. Only the limits of all apply to peers that
// HasNoQuota(); other callers leave them operator_reserve_percent.
absl::Status CheckJobCount(const v1::Limits& limits,
                           const accept::PeerCredentials& peer,
                           const Counts& jobs,
                           const access::UserBounds& bounds = {});
absl::Status CheckSessionCount(const v1::Limits& limits,
                               const accept::PeerCredentials& peer,
                               const Counts& sessions,
                               const access::UserBounds& bounds = {});

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_USER_LIMITS_H_
