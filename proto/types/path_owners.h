#ifndef OPTSTATE_PROTO_TYPES_PATH_OWNERS_H_
#define OPTSTATE_PROTO_TYPES_PATH_OWNERS_H_

#include <string>

#include "absl/status/status.h"

namespace optstate {

// Who may own the directories on the way to a path.
enum class PathOwners {
  // This process's user and root.
  kOurs,
  // Those, and whoever was given a directory by these: it lies where only they
  // could have made it.
  kTrusted,
};

// Whether a stranger could have put something of their own at an absolute
// `path`, or could do so later: looks at every directory on the way, also
// behind symbolic links, and at whatever is at `path` itself. Directories that
// others may write to must be sticky, as /tmp is, and what lies in one must
// belong to this process's user or to root. With kOurs a group counts as
// others, unless it is root's or this process's own. What is not there yet is
// no fault.
//
// FAILED_PRECONDITION, naming the directory, its owner or mode, and what to do.
absl::Status CheckPathOwners(const std::string& path, PathOwners owners);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_PATH_OWNERS_H_
