#include "server/os/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/os/small_file.h"
#include "storage/io/file_error.h"

namespace optstate::os {
namespace {

absl::Status Refusal(const std::string& path, absl::string_view what) {
  // The holder writes its pid just after locking, so it can be missing.
  const absl::StatusOr<std::string> text = ReadSmallFile(path, 64);
  const std::string pid =
      text.ok() ? std::string(absl::StripAsciiWhitespace(*text)) : "";
  return absl::FailedPreconditionError(absl::StrCat(
      what, " is in use by ",
      pid.empty() ? "another process" : absl::StrCat("process ", pid),
      " (lock file ", path, ")"));
}

}  // namespace

absl::StatusOr<FileLock> FileLock::Take(const std::string& path,
                                        absl::string_view what) {
  UniqueFd fd(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.ok()) return io::FileError(errno, absl::StrCat("open ", path), path);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return Refusal(path, what);
    return io::FileError(errno, absl::StrCat("flock ", path), path);
  }
  const std::string pid = absl::StrCat(::getpid(), "\n");
  // The file is truncated after the write: on a full file system the block must
  // not be given up.
  const auto bytes = static_cast<ssize_t>(pid.size());
  if (::pwrite(fd.get(), pid.data(), pid.size(), 0) != bytes ||
      ::ftruncate(fd.get(), bytes) != 0) {
    return io::FileError(errno, absl::StrCat("write ", path), path, pid.size());
  }
  return FileLock(std::move(fd));
}

absl::StatusOr<FileLock> FileLock::Inherit(const std::string& path,
                                           UniqueFd fd) {
  FileLock lock(std::move(fd));
  if (!lock.IsAt(path) || ::flock(lock.fd(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not locked by the inherited fd ", lock.fd()));
  }
  return lock;
}

bool FileLock::IsAt(const std::string& path) const {
  struct stat locked;
  struct stat named;
  return ::fstat(fd(), &locked) == 0 && ::stat(path.c_str(), &named) == 0 &&
         locked.st_dev == named.st_dev && locked.st_ino == named.st_ino;
}

}  // namespace optstate::os
