#ifndef OPTSTATE_SERVER_ACCESS_JOB_ACCESS_H_
#define OPTSTATE_SERVER_ACCESS_JOB_ACCESS_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "optstate/v1/types.pb.h"

namespace optstate::access {

// Checks that the access is one that a job can have, whatever users the machine
// has: see CheckAccessNames().
absl::Status CheckAccessForm(const v1::JobAccess& access);

// Checks that a job of `owner` can have the access. INVALID_ARGUMENT: as above,
// this machine has no such user or group, or the owner is not in the group;
// root counts as a member of every group.
absl::Status CheckJobAccess(const v1::JobAccess& access, uid_t owner);

// Returns whether two say the same.
bool IsSameAccess(const v1::JobAccess& one, const v1::JobAccess& other);

// Returns "private; group research; readers alice, @ops", or "not private".
std::string AccessText(const v1::JobAccess& access);

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_JOB_ACCESS_H_
