#include "server/session/lock_admission.h"

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/memory/memory_locker.h"
#include "storage/tmpfs_info.h"

namespace optstate::session {

// On a disk the state is page cache, which may be larger than memory.
absl::Status CheckLockable(const std::string& directory) {
  OPTSTATE_ASSIGN_OR_RETURN(const storage::TmpfsInfo info,
                            storage::InspectDirectory(directory));
  if (info.is_tmpfs) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the state directory is on ", info.file_system, " at ", info.mount_point,
      ", not in memory: there is nothing to lock. Set state_dir "
      "to a tmpfs"));
}

std::string LockLimitText() {
  return absl::StrCat(
      "an engine may lock ", storage::MemoryLocker::LimitBytes(),
      " bytes (RLIMIT_MEMLOCK); raise it (LimitMEMLOCK=infinity in the "
      "daemon's unit, memlock in /etc/security/limits.conf or `ulimit -l` for "
      "a user, --ulimit memlock=-1 for a container, or CAP_IPC_LOCK) and start "
      "the daemon again, or set lock_memory: never");
}

absl::Status AdmitLock(const v1::DaemonConfig& config,
                       const std::string& directory, uint64_t job_state_bytes,
                       uint64_t may_lock_bytes) {
  if (config.lock_memory() != v1::LOCK_MEMORY_ALWAYS) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(CheckLockable(directory));
  // MemoryLocker::kUnlimited is more than any state.
  if (job_state_bytes <= may_lock_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("lock_memory: always, and the state of ", job_state_bytes,
                   " bytes cannot be locked in memory: ", LockLimitText()));
}

absl::Status AdmitLockOfNextEngine(const v1::DaemonConfig& config,
                                   const std::string& directory,
                                   uint64_t job_state_bytes) {
  return AdmitLock(config, directory, job_state_bytes,
                   storage::MemoryLocker::LimitBytes());
}

}  // namespace optstate::session
