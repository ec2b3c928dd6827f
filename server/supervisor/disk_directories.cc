#include "server/supervisor/disk_directories.h"

#include <spdlog/spdlog.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/config/nvme_directory.h"
#include "server/os/private_directory.h"
#include "server/supervisor/sleep/record_sync.h"
#include "storage/access_file.h"
#include "storage/block_device/extents.h"
#include "storage/disk_folder.h"
#include "storage/tmpfs_info.h"

namespace optstate::supervisor {
namespace {

constexpr char kLockName[] = "/lock";
constexpr absl::string_view kDeletedPrefix = ".deleted-";

// Returns the names in DIR/jobs, and logs directories that cannot be read.
std::vector<std::string> NamesIn(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator
           entry(directory + storage::kDiskJobsFolder, error),
       end;
       !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) {
    spdlog::error("{}{}: {}", directory, storage::kDiskJobsFolder,
                  error.message());
  }
  return names;
}

// Renames a folder and makes that durable.
absl::Status Rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    return OsError(errno, absl::StrCat("rename ", from, " to ", to));
  }
  return storage::SyncFolder(to.substr(0, to.rfind('/')));
}

}  // namespace

absl::StatusOr<DiskDirectories> DiskDirectories::Open(
    const v1::NvmeSettings& nvme) {
  DiskDirectories disks;
  for (const std::string& path : nvme.directories()) {
    if (!storage::MayExist(path)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "nvme.directories: ", path,
          " is not there: mount its disk, or make it (mkdir -m 0700 ", path,
          ")"));
    }
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(os::EnsurePrivateDirectory(path, 0700), "nvme.directories"));
    OPTSTATE_RETURN_IF_ERROR(
        os::EnsurePrivateDirectory(path + storage::kDiskJobsFolder, 0700));
    OPTSTATE_ASSIGN_OR_RETURN(
        os::FileLock lock,
        os::FileLock::Take(path + kLockName,
                           absl::StrCat("disk directory ", path)));
    disks.locks_.push_back(std::move(lock));
    OPTSTATE_RETURN_IF_ERROR(disks.DescribeAndClean(path));
    disks.paths_.push_back(path);
    disks.devices_.push_back(config::DeviceOf(nvme, path));
    if (disks.devices_.back().empty()) continue;
    OPTSTATE_RETURN_IF_ERROR(disks.TakeDevice(path, disks.devices_.back()));
  }
  return disks;
}

absl::Status DiskDirectories::TakeDevice(const std::string& directory,
                                         const std::string& device) {
  OPTSTATE_ASSIGN_OR_RETURN(
      storage::OwnedDevice owned,
      storage::OpenDeviceOf(directory, device, storage::DeviceUse::kOwn));
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t free_bytes,
                            storage::FreeBytes(directory, owned.superblock));
  spdlog::info(
      "disk directory {}: records of new jobs are on device {} ({}), of whose "
      "{} bytes {} are free",
      directory, device, owned.superblock.device_id,
      owned.superblock.device_bytes, free_bytes);
  owned_.push_back(std::move(owned.device));
  return absl::OkStatus();
}

absl::Status DiskDirectories::DescribeAndClean(const std::string& path) const {
  int jobs = 0;
  int durable = 0;
  for (const std::string& name : NamesIn(path)) {
    const std::string folder = storage::DiskFolder(path, name);
    if (absl::StartsWith(name, kDeletedPrefix)) {
      spdlog::info("removed {}, left half done: {}", folder,
                   os::RemoveTree(folder).ToString());
      continue;
    }
    ++jobs;
    if (storage::IsDurableFolder(folder)) ++durable;
  }
  OPTSTATE_ASSIGN_OR_RETURN(const storage::TmpfsInfo info,
                            storage::InspectDirectory(path));
  spdlog::info(
      "disk directory {}: on the {} at {}, with files of {} jobs, {} "
      "of them durable",
      path, info.file_system, info.mount_point, jobs, durable);
  return absl::OkStatus();
}

absl::Status DiskDirectories::CheckInPlace() const {
  for (size_t i = 0; i < paths_.size(); ++i) {
    if (locks_[i].IsAt(paths_[i] + kLockName)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "nvme.directories: ", paths_[i],
        " is not the directory that it was when the daemon started: a disk was "
        "mounted or unmounted there, or it was removed. Start the daemon "
        "again"));
  }
  return absl::OkStatus();
}

std::set<std::string> DiskDirectories::Jobs() const {
  std::set<std::string> jobs;
  for (const std::string& path : paths_) {
    for (std::string& name : NamesIn(path)) {
      if (accept::CheckJobName(name).ok()) jobs.insert(std::move(name));
    }
  }
  return jobs;
}

std::string DiskDirectories::FirstFolder(const std::string& name) const {
  return paths_.empty() ? "" : storage::DiskFolder(paths_[0], name);
}

bool DiskDirectories::HasFolder(const std::string& name) const {
  return std::any_of(paths_.begin(), paths_.end(), [&](const auto& path) {
    return storage::MayExist(storage::DiskFolder(path, name));
  });
}

bool DiskDirectories::IsDurable(const std::string& name) const {
  return std::any_of(paths_.begin(), paths_.end(), [&](const auto& path) {
    return storage::IsDurableFolder(storage::DiskFolder(path, name));
  });
}

absl::Status DiskDirectories::CheckNotAsleep(const std::string& name) const {
  for (const std::string& path : paths_) {
    const std::string note =
        storage::DiskFolder(path, name) + storage::kDiskAsleepFile;
    if (!storage::MayExist(note)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", name, "\" is asleep in ",
        storage::ReadDiskText(note).value_or("a folder"),
        ", where this daemon did not find it: mount its disk, set "
        "sleep_directory as it was, and start the daemon again; or, when that "
        "folder is lost, remove ",
        note));
  }
  return absl::OkStatus();
}

void DiskDirectories::ForgetSleep(const std::string& name) const {
  for (const std::string& path : paths_) {
    ForgetSleepIn(storage::DiskFolder(path, name));
  }
}

absl::Status DiskDirectories::CheckMayCreate(const std::string& name,
                                             uid_t owner) const {
  OPTSTATE_RETURN_IF_ERROR(CheckInPlace());
  OPTSTATE_RETURN_IF_ERROR(CheckNotAsleep(name));
  if (!IsDurable(name)) return absl::OkStatus();
  const std::string folder = storage::DiskFolder(paths_[0], name);
  const absl::StatusOr<std::optional<uint32_t>> on_disk =
      storage::ReadDiskOwner(folder);
  if (!on_disk.ok() || !on_disk->has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", name, "\" is durable, and ", folder, storage::kDiskOwnerFile,
        on_disk.ok() ? " is missing" : " cannot be read",
        ": is its disk mounted? If it is, write the uid of the job's owner to "
        "that file"));
  }
  if (**on_disk == owner) return absl::OkStatus();
  if (storage::MayBePrivate(folder)) {
    return absl::PermissionDeniedError(
        absl::StrCat("the job name \"", name,
                     "\" is taken on this node: choose another job name"));
  }
  return absl::PermissionDeniedError(
      absl::StrCat("job \"", name, "\" is on disk (", folder,
                   ") and belongs to uid ", **on_disk, ", not to uid ", owner));
}

std::map<std::string, uid_t, std::less<>> DiskDirectories::DurableJobs() const {
  std::map<std::string, uid_t, std::less<>> jobs;
  for (const std::string& name : Jobs()) {
    if (!IsDurable(name)) continue;
    const std::string folder = storage::DiskFolder(paths_[0], name);
    if (!storage::MayExist(folder + storage::kDiskCommitsFile)) {
      spdlog::error(
          "{} is missing, and another directory has files of that durable job: "
          "left alone. Is its disk mounted?",
          folder + storage::kDiskCommitsFile);
      continue;
    }
    const absl::StatusOr<std::optional<uint32_t>> owner =
        storage::ReadDiskOwner(folder);
    if (!owner.ok() || !owner->has_value()) {
      spdlog::error(
          "{} has a job on disk, but no owner: left alone. Write the owner's "
          "uid to {}{}: {}",
          folder, folder, storage::kDiskOwnerFile, owner.status().ToString());
      continue;
    }
    jobs[name] = **owner;
  }
  return jobs;
}

void DiskDirectories::RemoveEnded(
    const std::function<bool(const std::string&)>& is_known) {
  for (const std::string& name : Jobs()) {
    if (is_known(name) || IsDurable(name)) continue;
    const absl::Status awake = CheckNotAsleep(name);
    if (!awake.ok()) {
      spdlog::error("left alone: {}", awake.ToString());
      continue;
    }
    size_t used = 0;
    while (used < paths_.size() &&
           !storage::IsDiskFolderInUse(storage::DiskFolder(paths_[used], name),
                                       "", devices_[used])) {
      ++used;
    }
    if (used < paths_.size()) {
      spdlog::warn(
          "{} is of a job that is not here, and may go on elsewhere ({} says "
          "where): left alone",
          storage::DiskFolder(paths_[used], name),
          storage::kDiskMemoryFile + 1);
      continue;
    }
    const auto folders = Discard(name);
    if (!folders.ok()) spdlog::error("{}", folders.status().ToString());
    if (!folders.ok()) continue;
    for (const std::string& folder : *folders) {
      const absl::Status removed = os::RemoveTree(folder);
      if (!removed.ok()) spdlog::error("{}", removed.ToString());
    }
  }
}

absl::StatusOr<std::vector<std::string>> DiskDirectories::Discard(
    const std::string& name) {
  OPTSTATE_RETURN_IF_ERROR(CheckInPlace());
  std::vector<std::pair<std::string, std::string>> renamed;
  absl::Status status;
  for (const std::string& path : paths_) {
    const std::string folder = storage::DiskFolder(path, name);
    if (!storage::MayExist(folder)) continue;
    std::string discarded;
    do {
      discarded =
          storage::DiskFolder(path, absl::StrCat(kDeletedPrefix, ++discarded_));
    } while (storage::MayExist(discarded));
    renamed.emplace_back(folder, discarded);
    status = Rename(folder, discarded);
    if (!status.ok()) break;
  }
  std::vector<std::string> discarded;
  for (const auto& [from, to] : renamed) {
    if (status.ok()) {
      discarded.push_back(to);
    } else if (storage::MayExist(to)) {
      const absl::Status back = Rename(to, from);
      if (!back.ok()) spdlog::error("{}", back.ToString());
    }
  }
  if (!status.ok()) return status;
  return discarded;
}

}  // namespace optstate::supervisor
