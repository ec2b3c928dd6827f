#include "server/supervisor/device_formatter.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/config/nvme_directory.h"
#include "server/os/file_lock.h"
#include "server/os/private_directory.h"
#include "storage/block_device/device_format.h"
#include "storage/disk_folder.h"

namespace optstate::supervisor {

absl::StatusOr<std::string> FormatDeviceOf(absl::string_view text, bool force) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::NvmeDirectory named,
                            config::ParseNvmeDirectory(text));
  const std::string& directory = named.path();
  if (named.device().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\": must be DIR,device=DEVICE"));
  }
  if (!storage::MayExist(directory)) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory, " is not there: make it (mkdir -m 0700 ",
                     directory, "), where it outlives a reboot"));
  }
  OPTSTATE_RETURN_IF_ERROR(os::EnsurePrivateDirectory(directory, 0700));
  OPTSTATE_ASSIGN_OR_RETURN(
      const os::FileLock lock,
      os::FileLock::Take(directory + "/lock",
                         absl::StrCat("disk directory ", directory)));
  OPTSTATE_ASSIGN_OR_RETURN(
      const storage::Superblock superblock,
      storage::FormatDevice(directory, named.device(), force));
  return absl::StrCat(named.device(), " (device ", superblock.device_id,
                      ") has ", superblock.device_bytes,
                      " bytes for the records of jobs in ", directory);
}

}  // namespace optstate::supervisor
