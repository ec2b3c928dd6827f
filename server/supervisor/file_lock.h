#ifndef OPTSTATE_SERVER_SUPERVISOR_FILE_LOCK_H_
#define OPTSTATE_SERVER_SUPERVISOR_FILE_LOCK_H_

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/types/unique_fd.h"

namespace optstate::supervisor {

// Holds a file locked (flock) for as long as the process lives or the object
// does. The file carries the holder's pid for others to read, and is left in
// place afterwards: unlinking a lock file lets two processes hold "the" lock.
class FileLock {
 public:
  // FAILED_PRECONDITION when another process has it: "WHAT is in use by
  // process PID (lock file PATH)".
  static absl::StatusOr<FileLock> Take(const std::string& path,
                                       absl::string_view what);

 private:
  explicit FileLock(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_FILE_LOCK_H_
