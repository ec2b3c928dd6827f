#ifndef OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_
#define OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_

#include <sys/types.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace optstate::supervisor {

// Permissions of users; PERMISSION_DENIED names the user who asks and those who
// may. Reading is open to every user who reaches the socket.

// Allows attaching to a job to its owner and root.
absl::Status CheckMayJoinJob(absl::string_view job, uid_t owner, uid_t uid);

// Allows changing or deleting a job to its owner, root and the daemon's user.
absl::Status CheckMayChangeJob(absl::string_view job, uid_t owner, uid_t uid);

// Allows operations on all jobs to root and the daemon's user.
absl::Status CheckOperator(uid_t uid);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_
