#ifndef OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_
#define OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_

#include <sys/types.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/types.pb.h"
#include "server/access/caller.h"

namespace optstate::supervisor {

// Permissions of callers concerning jobs; PERMISSION_DENIED names the caller
// and those who may. server/admin/method_roles.h says which role each call of
// Admin takes at least.
//
//                               look  attach  change  change the access
//   owner                        x      x       x            x
//   member of access.group       x      x       x
//   reader of a private job      x
//   operator                     x    root      x            x
//   others                  not private
//
// Attaching and changing take the role trainer besides. For a caller who may
// not look at a job there is none of that name: the answer is NoJob(), in the
// same words as for a name that no job has. Group members and readers are
// looked up in the machine's tables (access/memberships.h), if all else does
// not decide.

// NOT_FOUND: there is no job of this name, or none for this caller.
absl::Status NoJob(absl::string_view job);

// Allows making jobs, and sessions at all, to trainers and operators.
absl::Status CheckMayTrain(const access::Caller& caller);

// Returns whether the caller may look at a job.
bool MayLook(uid_t owner, const v1::JobAccess& access,
             const access::Caller& caller);
// NOT_FOUND: the caller may not.
absl::Status CheckMayLook(absl::string_view job, uid_t owner,
                          const v1::JobAccess& access,
                          const access::Caller& caller);

// Allows attaching to a job to its owner, its group and root. To a caller who
// may not look at it, and who wants to make one of that name, the error says no
// more than that the name is taken.
absl::Status CheckMayJoinJob(absl::string_view job, uid_t owner,
                             const v1::JobAccess& access,
                             const access::Caller& caller);

// Allows changing or deleting a job to its owner, its group and operators.
absl::Status CheckMayChangeJob(absl::string_view job, uid_t owner,
                               const v1::JobAccess& access,
                               const access::Caller& caller);

// Allows saying who may use a job to its owner and operators.
absl::Status CheckMayChangeAccess(absl::string_view job, uid_t owner,
                                  const v1::JobAccess& access,
                                  const access::Caller& caller);

// Allows operations on all jobs to operators.
absl::Status CheckOperator(const access::Caller& caller);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_PERMISSIONS_H_
