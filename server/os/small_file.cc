#include "server/os/small_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"
#include "storage/io/file_error.h"

namespace optstate::os {
namespace {

// Returns an error of a file that is made. Callers explain a file system that
// is full: storage::ExplainFull() knows of limits that a tmpfs has.
absl::Status CreateError(int error, absl::string_view what,
                         const std::string& path) {
  const std::string call = absl::StrCat(what, " ", path);
  return error == ENOSPC ? OsError(error, call)
                         : io::FileError(error, call, path);
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t bytes_max) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return io::FileError(errno, absl::StrCat("open ", path), path);
  std::string text;
  char buffer[4096];
  while (true) {
    const ssize_t count = ::read(fd.get(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return io::FileError(errno, absl::StrCat("read ", path), path);
    }
    if (count == 0) return text;
    text.append(buffer, static_cast<size_t>(count));
    if (text.size() > bytes_max) {
      return absl::ResourceExhaustedError(
          absl::StrCat(path, " has more than ", bytes_max, " bytes"));
    }
  }
}

absl::Status CreateSmallFile(const std::string& path, absl::string_view text) {
  UniqueFd fd(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.ok()) return CreateError(errno, "create", path);
  while (!text.empty()) {
    const ssize_t count = ::write(fd.get(), text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return CreateError(errno, "write", path);
    text.remove_prefix(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

}  // namespace optstate::os
