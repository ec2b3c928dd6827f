#ifndef OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_
#define OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_

#include <sys/types.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/access/caller.h"

namespace optstate::supervisor {

// Permissions of callers concerning jobs; PERMISSION_DENIED names the caller
// and those who may. server/admin/method_roles.h says which role each call of
// Admin takes at least.

// Allows making jobs, and sessions at all, to trainers and operators.
absl::Status CheckMayTrain(const access::Caller& caller);

// Allows attaching to a job to its owner and root.
absl::Status CheckMayJoinJob(absl::string_view job, uid_t owner,
                             const access::Caller& caller);

// Allows changing or deleting a job to its owner and operators.
absl::Status CheckMayChangeJob(absl::string_view job, uid_t owner,
                               const access::Caller& caller);

// Allows operations on all jobs to operators.
absl::Status CheckOperator(const access::Caller& caller);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_
