#ifndef OPTSTATE_SERVER_OS_FILE_LOCK_H_
#define OPTSTATE_SERVER_OS_FILE_LOCK_H_

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/types/unique_fd.h"

namespace optstate::os {

// Holds a file locked (flock) for the lifetime of the process or the object.
// The file carries the holder's pid for other processes to read, and is left in
// place afterwards: unlinking a lock file lets two processes hold "the" lock.
class FileLock {
 public:
  // Locks the file. FAILED_PRECONDITION when another process has it locked:
  // "WHAT is in use by process PID (lock file PATH)".
  static absl::StatusOr<FileLock> Take(const std::string& path,
                                       absl::string_view what);
  // Inherits the lock of the process that executed this one in its own place.
  // FAILED_PRECONDITION when `fd` does not hold PATH locked.
  static absl::StatusOr<FileLock> Inherit(const std::string& path, UniqueFd fd);

  int fd() const { return fd_.get(); }
  // Returns whether PATH is still the locked file.
  bool IsAt(const std::string& path) const;

 private:
  explicit FileLock(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_FILE_LOCK_H_
