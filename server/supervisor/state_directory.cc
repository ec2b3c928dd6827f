#include "server/supervisor/state_directory.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/os/private_directory.h"
#include "server/supervisor/sleep/sleep_directory.h"

namespace optstate::supervisor {
namespace {

constexpr char kLockName[] = "/lock";
constexpr char kJobsName[] = "/jobs";

// Refuses hugetlbfs, whose files can only be mapped, and only in whole pages:
// the lock's pid and a job's description are written.
absl::Status CheckFileSystem(const std::string& path) {
  OPTSTATE_ASSIGN_OR_RETURN(const storage::TmpfsInfo info,
                            storage::InspectDirectory(path));
  if (!info.is_hugetlbfs) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "state directory ", path,
      " is on a hugetlbfs, to whose files nothing can be written; for huge "
      "pages take a tmpfs that is mounted with huge=within_size, or let the "
      "daemon mount one (huge_pages: mount)"));
}

}  // namespace

std::string DescribeStatePages(v1::HugePages setting,
                               const storage::TmpfsInfo& info) {
  if (setting != v1::HUGE_PAGES_NEVER || !info.is_tmpfs) {
    return storage::DescribePages(info);
  }
  if (info.huge_pages()) {
    return absl::StrCat(
        storage::DescribePages(info),
        "; huge_pages: never in the configuration cannot overrule that",
        info.shmem_enabled == "force"
            ? ""
            : ": mount it with huge=never, or choose another state_dir");
  }
  return "4 KiB pages, because the configuration says huge_pages: never";
}

absl::StatusOr<StateDirectory> StateDirectory::Open(
    const v1::DaemonConfig& config, UniqueFd inherited_lock) {
  const std::string& path = config.state_dir();
  OPTSTATE_RETURN_IF_ERROR(os::EnsurePrivateDirectory(path, 0700));
  if (config.huge_pages() == v1::HUGE_PAGES_MOUNT) {
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(storage::MountHugeTmpfs(path), "huge_pages: mount"));
    // After the mount the path names another directory.
    OPTSTATE_RETURN_IF_ERROR(os::EnsurePrivateDirectory(path, 0700));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckFileSystem(path));
  OPTSTATE_ASSIGN_OR_RETURN(
      os::FileLock lock,
      inherited_lock.ok()
          ? os::FileLock::Inherit(path + kLockName, std::move(inherited_lock))
          : os::FileLock::Take(path + kLockName,
                               absl::StrCat("state directory ", path)));
  OPTSTATE_ASSIGN_OR_RETURN(JobRegistry registry,
                            JobRegistry::Open(path + kJobsName));
  OPTSTATE_ASSIGN_OR_RETURN(DiskDirectories disks,
                            DiskDirectories::Open(config.nvme()));
  OPTSTATE_ASSIGN_OR_RETURN(SleepDirectory sleep, SleepDirectory::Open(config));
  registry.UseSleepDirectory(std::move(sleep));
  registry.UseDisks(std::move(disks));
  OPTSTATE_ASSIGN_OR_RETURN(const storage::TmpfsInfo info,
                            storage::InspectDirectory(path));
  const std::string pages = DescribeStatePages(config.huge_pages(), info);
  if (config.huge_pages() == v1::HUGE_PAGES_NEVER && info.huge_pages()) {
    spdlog::warn("state directory {}: {}", path, pages);
  }
  return StateDirectory(path, std::move(lock), std::move(registry), pages);
}

absl::Status StateDirectory::CheckInPlace() const {
  if (lock_.IsAt(path_ + kLockName) &&
      ::access((path_ + kJobsName).c_str(), F_OK) == 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("state directory ", path_,
                   " was removed or replaced since the daemon has it; jobs' "
                   "engines go on with the files that they have open. Save "
                   "what is needed through their trainers, then stop the "
                   "daemon and start it again"));
}

}  // namespace optstate::supervisor
