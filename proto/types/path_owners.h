#ifndef OPTSTATE_PROTO_TYPES_PATH_OWNERS_H_
#define OPTSTATE_PROTO_TYPES_PATH_OWNERS_H_

#include <string>

#include "absl/status/status.h"

namespace optstate {

// The users that may own the directories on the way to a path.
enum class PathOwners {
  // This process's user and root.
  kOurs,
  // The users of kOurs, and a user to whom these gave a directory: it lies
  // where only they could have made it.
  kTrusted,
};

// Checks that no stranger could have put an entry of their own at an absolute
// `path`, or could do so later: looks at every directory on the way, also
// behind symbolic links, and at the entry at `path` itself. Directories that
// others may write to must be sticky, as /tmp is, and an entry in such a
// directory must belong to this process's user or to root. With kOurs a group
// counts as others, unless it is root's or this process's own. A missing entry
// is no fault.
//
// FAILED_PRECONDITION, naming the directory, its owner or mode, and a remedy.
absl::Status CheckPathOwners(const std::string& path, PathOwners owners);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_PATH_OWNERS_H_
