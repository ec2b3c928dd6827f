#include "server/os/private_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::os {
namespace {

absl::Status CheckDirectory(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) {
    return OsError(errno, absl::StrCat("stat ", path));
  }
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a directory"));
  }
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " belongs to uid ", info.st_uid, ", not to the daemon's uid ",
        ::geteuid(), ": remove it or choose another path"));
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s is writable by other users (mode %04o): chmod go-w it or choose "
        "another path",
        path, info.st_mode & 07777u));
  }
  return absl::OkStatus();
}

absl::Status CreateParents(const std::string& path) {
  const std::filesystem::path parent =
      std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(parent, error);
  if (!error) return absl::OkStatus();
  return OsError(error.value(), absl::StrCat("create ", parent.string()));
}

}  // namespace

absl::Status EnsurePrivateDirectory(const std::string& path, mode_t mode) {
  if (::mkdir(path.c_str(), mode) != 0) {
    if (errno == ENOENT) {
      OPTSTATE_RETURN_IF_ERROR(CreateParents(path));
      if (::mkdir(path.c_str(), mode) == 0) return absl::OkStatus();
    }
    if (errno != EEXIST) return OsError(errno, absl::StrCat("mkdir ", path));
  }
  return CheckDirectory(path);
}

absl::Status RemoveTree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (!error) return absl::OkStatus();
  return OsError(error.value(), absl::StrCat("remove ", path));
}

}  // namespace optstate::os
