#include "proto/types/path_owners.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

// Returns the uid that the kernel reports for users unknown to this user
// namespace. In a rootless container the machine's root is one of them.
uid_t UnknownUid() {
  uid_t uid = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> uid;
  return uid;
}

bool OthersMayWrite(const struct stat& info, PathOwners owners) {
  if ((info.st_mode & S_IWOTH) != 0) return true;
  return owners == PathOwners::kOurs && (info.st_mode & S_IWGRP) != 0 &&
         info.st_gid != 0 && info.st_gid != ::getegid();
}

absl::Status NotOurs(const std::string& path, const struct stat& info) {
  return absl::FailedPreconditionError(absl::StrCat(
      path, " belongs to uid ", info.st_uid, ", not to uid ", ::geteuid(),
      " or root: whoever made it can take what passes there. Have it removed, "
      "or choose another path"));
}

// Checks one entry after another, from the root on.
class Way {
 public:
  Way(PathOwners owners, bool is_last_ours)
      : owners_(owners), is_last_ours_(is_last_ours) {}

  absl::Status Enter(const std::string& path, bool is_last) {
    struct stat info;
    if (::lstat(path.c_str(), &info) != 0) {
      return OsError(errno, absl::StrCat("stat ", path));
    }
    const bool ours = info.st_uid == 0 || info.st_uid == ::geteuid();
    const bool must_be_ours = anybody_made_it_ ||
                              owners_ == PathOwners::kOurs ||
                              (is_last && is_last_ours_);
    if (must_be_ours && !ours && (is_last || info.st_uid != unknown_)) {
      return NotOurs(path, info);
    }
    anybody_made_it_ = false;
    if (!S_ISDIR(info.st_mode) || !OthersMayWrite(info, owners_)) {
      return absl::OkStatus();
    }
    anybody_made_it_ = true;
    if ((info.st_mode & S_ISVTX) != 0) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s is writable by other users and not sticky (mode %04o): they can "
        "put another file in the place of any that is there. chmod go-w it "
        "(or +t, if all are to use it), or choose another path",
        path, info.st_mode & 07777u));
  }

 private:
  const PathOwners owners_;
  const bool is_last_ours_;
  const uid_t unknown_ = UnknownUid();
  bool anybody_made_it_ = false;  // applies to the next entry
};

absl::Status Walk(const std::filesystem::path& path, Way way) {
  std::filesystem::path at;
  for (auto part = path.begin(); part != path.end(); ++part) {
    at /= *part;
    if (part->empty()) continue;  // a slash at the end
    const bool is_last = std::next(part) == path.end();
    const absl::Status entered = way.Enter(at.string(), is_last);
    if (absl::IsNotFound(entered)) return absl::OkStatus();
    OPTSTATE_RETURN_IF_ERROR(entered);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPathOwners(const std::string& path, PathOwners owners) {
  const Way way(owners, owners == PathOwners::kOurs);
  // The path is checked as written, for the owners of links, and then where the
  // links lead.
  OPTSTATE_RETURN_IF_ERROR(
      Walk(std::filesystem::path(path).lexically_normal(), way));
  std::error_code error;
  const std::filesystem::path real =
      std::filesystem::weakly_canonical(path, error);
  if (error) return OsError(error.value(), absl::StrCat("resolve ", path));
  return Walk(real, way);
}

}  // namespace optstate
