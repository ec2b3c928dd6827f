#include "server/os/executable.h"

#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::os {

absl::StatusOr<std::string> ExecutableIdentity(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) {
    return OsError(errno, absl::StrCat("stat ", path));
  }
  return absl::StrCat(info.st_dev, ":", info.st_ino, ":", info.st_size, ":",
                      info.st_mtim.tv_sec, ":", info.st_mtim.tv_nsec);
}

}  // namespace optstate::os
