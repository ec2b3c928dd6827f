#ifndef OPTSTATE_SERVER_ACCESS_JOB_ACCESS_H_
#define OPTSTATE_SERVER_ACCESS_JOB_ACCESS_H_

#include <sys/types.h>

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/types.pb.h"

namespace optstate::access {

// Limits of a v1::JobAccess, which goes in a Hello and in a small file.
inline constexpr int kReadersMax = 32;
inline constexpr size_t kAccessNameBytesMax = 100;

// Checks that the access is one that a job can have, whatever users the machine
// has. INVALID_ARGUMENT: a name that no user or group can have, readers of a
// job that is not private, too many readers.
absl::Status CheckAccessForm(const v1::JobAccess& access);

// Checks that a job of `owner` can have the access. INVALID_ARGUMENT: as above,
// this machine has no such user or group, or the owner is not in the group;
// root counts as a member of every group.
absl::Status CheckJobAccess(const v1::JobAccess& access, uid_t owner);

// Returns the group of a reader such as "@ops"; empty: the reader is a user.
absl::string_view ReaderGroup(absl::string_view reader);

// Returns "private; group research; readers alice, @ops", or "not private".
std::string AccessText(const v1::JobAccess& access);

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_JOB_ACCESS_H_
