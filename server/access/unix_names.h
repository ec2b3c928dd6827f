#ifndef OPTSTATE_SERVER_ACCESS_UNIX_NAMES_H_
#define OPTSTATE_SERVER_ACCESS_UNIX_NAMES_H_

#include <sys/types.h>

#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"

namespace optstate::access {

// Finds a user or group of this machine by name or by number, which needs no
// entry in its tables. NOT_FOUND: no such name.
absl::StatusOr<uid_t> FindUser(const std::string& text);
absl::StatusOr<gid_t> FindGroup(const std::string& text);

// Returns the groups that this machine's tables have a user in, its own among
// them; none: they have no such user.
absl::StatusOr<std::set<gid_t>> GroupsOf(uid_t uid);

// Finds access.operator_groups.
absl::StatusOr<std::set<gid_t>> FindOperatorGroups(
    const v1::AccessSettings& access);

// Returns whether the process at the other end of a unix socket was in one of
// `groups` when it connected; its own group is `gid` (SO_PEERCRED).
bool PeerIsIn(int socket, gid_t gid, const std::set<gid_t>& groups);

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_UNIX_NAMES_H_
