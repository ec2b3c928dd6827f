#include "server/os/small_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"

namespace optstate::os {

absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t bytes_max) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  std::string text;
  char buffer[4096];
  while (true) {
    const ssize_t count = ::read(fd.get(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return OsError(errno, absl::StrCat("read ", path));
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
  if (!fd.ok()) return OsError(errno, absl::StrCat("create ", path));
  while (!text.empty()) {
    const ssize_t count = ::write(fd.get(), text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return OsError(errno, absl::StrCat("write ", path));
    text.remove_prefix(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

}  // namespace optstate::os
