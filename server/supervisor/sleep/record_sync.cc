#include "server/supervisor/sleep/record_sync.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/config/nvme_directory.h"
#include "storage/disk_folder.h"

namespace optstate::supervisor {
namespace {

absl::Status Sync(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  if (::fsync(fd.get()) == 0) return absl::OkStatus();
  return OsError(errno, absl::StrCat("fsync of ", path));
}

absl::Status SyncFiles(const std::string& folder) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end;
       !error && entry != end; entry.increment(error)) {
    if (!entry->is_regular_file(error)) continue;
    OPTSTATE_RETURN_IF_ERROR(Sync(entry->path().string()));
  }
  if (error) return OsError(error.value(), absl::StrCat("list ", folder));
  return storage::SyncFolder(folder);
}

}  // namespace

absl::Status SyncRecords(const v1::NvmeSettings& nvme, const std::string& job,
                         const std::string& sleep_folder) {
  for (const std::string& directory : nvme.directories()) {
    const std::string folder = storage::DiskFolder(directory, job);
    if (!storage::MayExist(folder)) continue;
    OPTSTATE_RETURN_IF_ERROR(
        storage::WriteDurably(folder + storage::kDiskAsleepFile, sleep_folder));
    OPTSTATE_RETURN_IF_ERROR(SyncFiles(folder));
    const std::string device = config::DeviceOf(nvme, directory);
    if (!device.empty()) OPTSTATE_RETURN_IF_ERROR(Sync(device));
  }
  return absl::OkStatus();
}

void ForgetSleepIn(const std::string& disk_folder) {
  const std::string note = disk_folder + storage::kDiskAsleepFile;
  if (::unlink(note.c_str()) == 0 || errno == ENOENT) return;
  spdlog::warn("{}", OsError(errno, absl::StrCat("remove ", note)).ToString());
}

void ForgetSleep(const v1::NvmeSettings& nvme, const std::string& job) {
  for (const std::string& directory : nvme.directories()) {
    ForgetSleepIn(storage::DiskFolder(directory, job));
  }
}

}  // namespace optstate::supervisor
