#ifndef OPTSTATE_SERVER_OS_PRIVATE_DIRECTORY_H_
#define OPTSTATE_SERVER_OS_PRIVATE_DIRECTORY_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"

namespace optstate::os {

// Makes sure that `path` is a directory in which no other user can put, rename
// or remove anything; creates it with `mode` (and missing parents with 0755)
// when it is not there. FAILED_PRECONDITION when it is there but is no
// directory, belongs to another user than this one or root, or is writable by
// others: under /dev/shm and /tmp another user could have created it first.
absl::Status EnsurePrivateDirectory(const std::string& path, mode_t mode);

// Removes `path` and everything below it; OK when it is not there. Follows no
// symbolic link.
absl::Status RemoveTree(const std::string& path);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_PRIVATE_DIRECTORY_H_
