#include "storage/testing/test_mounts.h"

#include <sched.h>
#include <sys/mount.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/os_error.h"

namespace optstate::storage {
namespace {

absl::Status CannotMount(absl::string_view what, absl::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat("nothing can be mounted here: ", what, ": ", why));
}

absl::Status MountError(int error, absl::string_view what) {
  switch (error) {
    case EPERM:
    case EACCES:
      return CannotMount(what, "needs CAP_SYS_ADMIN");
    case ENODEV:
    case ENOSYS:
      return CannotMount(what, std::strerror(error));
    default:
      return OsError(error, what);
  }
}

}  // namespace

absl::Status EnterPrivateMounts() {
  if (::unshare(CLONE_NEWNS) != 0) {
    return MountError(errno, "unshare(CLONE_NEWNS)");
  }
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0) {
    return absl::OkStatus();
  }
  const char what[] = "mount of / as private";
  if (errno == EINVAL) {
    return CannotMount(what, "/ is no mount point, as in a chroot");
  }
  return MountError(errno, what);
}

absl::StatusOr<TestTmpfs> TestTmpfs::Mount(std::string directory,
                                           const std::string& options) {
  if (::mount("test", directory.c_str(), "tmpfs", 0, options.c_str()) != 0) {
    return MountError(errno, absl::StrCat("mount of a tmpfs on ", directory));
  }
  return TestTmpfs(std::move(directory));
}

TestTmpfs::~TestTmpfs() {
  if (!directory_.empty()) ::umount2(directory_.c_str(), MNT_DETACH);
}

}  // namespace optstate::storage
