#include "client/endpoint/embedded_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr absl::string_view kPrefix = "optstate-embedded-";

std::vector<std::string> Parents() {
  const char* variable = std::getenv("TMPDIR");
  return {"/dev/shm",
          variable != nullptr && *variable != '\0' ? variable : "/tmp"};
}

absl::StatusOr<std::string> MakeEmpty() {
  int error = 0;
  for (const std::string& parent : Parents()) {
    std::string path = absl::StrCat(parent, "/", kPrefix, "XXXXXX");
    if (mkdtemp(path.data()) != nullptr) return path;
    error = errno;
  }
  return OsError(error, absl::StrCat("mkdtemp in /dev/shm and ", Parents()[1]));
}

// Locks the file before it gets its name, so that a process that sees the file
// sees it locked.
absl::StatusOr<UniqueFd> LockAsOwner(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/owner.lock");
  const std::string unnamed = absl::StrCat(path, ".new");
  UniqueFd fd(open(unnamed.c_str(),
                   O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", unnamed));
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    return OsError(errno, absl::StrCat("flock ", unnamed));
  }
  if (rename(unnamed.c_str(), path.c_str()) != 0) {
    return OsError(errno, absl::StrCat("rename ", unnamed));
  }
  return fd;
}

// Adds the lock of a file to `held`; false when another process holds it. An
// unreadable file (no permission) counts as held.
bool TakeLock(const std::string& path, std::vector<UniqueFd>* held) {
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.ok()) return errno == ENOENT;
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return false;
  held->push_back(std::move(fd));
  return true;
}

// Returns whether the directory is abandoned; `held` keeps it so until it is
// gone.
bool IsAbandoned(const std::string& directory, std::vector<UniqueFd>* held) {
  struct stat info;
  if (lstat(directory.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) ||
      info.st_uid != geteuid()) {
    return false;
  }
  if (!TakeLock(absl::StrCat(directory, "/owner.lock"), held) ||
      held->empty() || !TakeLock(absl::StrCat(directory, "/lock"), held)) {
    return false;
  }
  // An engine can outlive its daemon, and a rank can still be training with it.
  std::error_code error;
  for (const auto& job : std::filesystem::directory_iterator(
           absl::StrCat(directory, "/jobs"), error)) {
    if (!TakeLock(absl::StrCat(job.path().string(), "/lock"), held)) {
      return false;
    }
  }
  return !error || error == std::errc::no_such_file_or_directory;
}

}  // namespace

absl::StatusOr<EmbeddedDirectory> MakeEmbeddedDirectory() {
  EmbeddedDirectory directory;
  OPTSTATE_ASSIGN_OR_RETURN(directory.path, MakeEmpty());
  absl::StatusOr<UniqueFd> lock = LockAsOwner(directory.path);
  if (!lock.ok()) {
    std::error_code ignored;
    std::filesystem::remove_all(directory.path, ignored);
    return lock.status();
  }
  directory.owner_lock = *std::move(lock);
  return directory;
}

void RemoveAbandonedDirectories() {
  for (const std::string& parent : Parents()) {
    std::error_code error;
    std::vector<std::string> found;
    for (const auto& entry :
         std::filesystem::directory_iterator(parent, error)) {
      if (absl::StartsWith(entry.path().filename().string(), kPrefix)) {
        found.push_back(entry.path().string());
      }
    }
    for (const std::string& directory : found) {
      std::vector<UniqueFd> held;
      if (!IsAbandoned(directory, &held)) continue;
      // Leftovers, with their cause, are left to the next daemon's cleanup.
      std::filesystem::remove_all(directory, error);
    }
  }
}

}  // namespace optstate::client
