#ifndef OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_
#define OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_

#include <sys/types.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace optstate::supervisor {

// Who may do what; PERMISSION_DENIED says who asks and who may. Looking is open
// to whoever reaches the socket.

// Attaching to a job: its owner and root.
absl::Status CheckMayJoinJob(absl::string_view job, uid_t owner, uid_t uid);

// Changing or deleting a job: its owner, root and the daemon's user.
absl::Status CheckMayChangeJob(absl::string_view job, uid_t owner, uid_t uid);

// What concerns every job: root and the daemon's user.
absl::Status CheckOperator(uid_t uid);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_
