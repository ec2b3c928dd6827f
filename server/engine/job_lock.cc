#include "server/engine/job_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "storage/tmpfs_info.h"

namespace optstate::engine {
namespace {

// Writes the pid of this process. If there is no room for the block, the holder
// stays unknown.
void WriteOwnPid(int fd) {
  // The text has a fixed length, so that nothing is left of a previous pid.
  const std::string pid = absl::StrFormat("%10d\n", ::getpid());
  (void)!::pwrite(fd, pid.data(), pid.size(), 0);
}

std::string HolderOf(int fd) {
  char text[16] = {};
  int pid = 0;
  if (::pread(fd, text, sizeof(text) - 1, 0) <= 0 ||
      !absl::SimpleAtoi(text, &pid)) {
    return "another engine of this job";
  }
  return absl::StrCat("another engine of this job, process ", pid, ",");
}

}  // namespace

absl::StatusOr<UniqueFd> LockJob(const std::string& directory,
                                 absl::Duration patience) {
  const std::string path = absl::StrCat(directory, "/lock");
  UniqueFd fd(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.ok()) {
    return storage::ExplainFull(
        OsError(errno, absl::StrCat("open(", path, ")")), directory);
  }
  const absl::Time deadline = absl::Now() + patience;
  // flock() has no timeout of its own.
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) {
      return OsError(errno, absl::StrCat("flock(", path, ")"));
    }
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(absl::StrCat(
          path, " is locked: ", HolderOf(fd.get()), " is still running"));
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  WriteOwnPid(fd.get());
  return fd;
}

}  // namespace optstate::engine
