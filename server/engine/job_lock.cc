#include "server/engine/job_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"

namespace optstate {

absl::StatusOr<UniqueFd> LockJob(const std::string& directory,
                                 absl::Duration patience) {
  const std::string path = absl::StrCat(directory, "/lock");
  UniqueFd fd(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open(", path, ")"));
  const absl::Time deadline = absl::Now() + patience;
  // flock() has no timeout of its own.
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) {
      return OsError(errno, absl::StrCat("flock(", path, ")"));
    }
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(absl::StrCat(
          path, " is locked: another engine of this job is still running"));
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  return fd;
}

}  // namespace optstate
