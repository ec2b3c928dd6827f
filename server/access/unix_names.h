#ifndef OPTSTATE_SERVER_ACCESS_UNIX_NAMES_H_
#define OPTSTATE_SERVER_ACCESS_UNIX_NAMES_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace optstate::access {

// Finds a user or group of this machine by name or by number, which needs no
// entry in its tables. NOT_FOUND: no such name.
absl::StatusOr<uid_t> FindUser(const std::string& text);
absl::StatusOr<gid_t> FindGroup(const std::string& text);

// Returns the name of a user; "": this machine knows none.
std::string NameOfUser(uid_t uid);
// Returns the groups of a user, the primary and all supplementary ones,
// ascending; none of a number without a name. The tables may be on another
// machine, so that this may take as long as a network does; an error says that
// they could not be read.
absl::StatusOr<std::vector<gid_t>> FindGroupsOf(uid_t uid);

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_UNIX_NAMES_H_
