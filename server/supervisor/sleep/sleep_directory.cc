#include "server/supervisor/sleep/sleep_directory.h"

#include <spdlog/spdlog.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/config/sleep_directory.h"
#include "server/os/private_directory.h"
#include "server/supervisor/sleep/job_sleeper.h"
#include "server/supervisor/sleep/sleep_manifest.h"
#include "storage/disk_folder.h"
#include "storage/tmpfs_info.h"

namespace optstate::supervisor {
namespace {

constexpr char kLockName[] = "/lock";
constexpr char kJobsName[] = "/jobs";
constexpr char kSetOne[] =
    "set sleep_directory to a directory on a disk, or nvme.directories, and "
    "start the daemon again";

std::vector<std::string> NamesIn(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end;
       !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) spdlog::error("{}: {}", directory, error.message());
  return names;
}

void RemoveHalfDone(const std::string& directory) {
  for (const std::string& name : NamesIn(directory)) {
    if (!absl::StartsWith(name, kNewSleepPrefix) &&
        !absl::StartsWith(name, kOldSleepPrefix)) {
      continue;
    }
    const std::string path = absl::StrCat(directory, "/", name);
    spdlog::info("removed {}, left half done: {}", path,
                 os::RemoveTree(path).ToString());
  }
}

}  // namespace

absl::StatusOr<SleepDirectory> SleepDirectory::Open(
    const v1::DaemonConfig& config) {
  SleepDirectory directory(config::SleepDirectoryOf(config));
  const std::string& path = directory.path_;
  if (path.empty()) return directory;
  if (!storage::MayExist(path)) {
    if (config.sleep_directory().empty()) return directory;
    return absl::FailedPreconditionError(absl::StrCat(
        "sleep_directory: ", path,
        " is not there: mount its disk, or make it (mkdir -m 0700 ", path,
        ")"));
  }
  OPTSTATE_RETURN_IF_ERROR(directory.Take());
  RemoveHalfDone(path + kJobsName);
  return directory;
}

absl::Status SleepDirectory::Take() {
  OPTSTATE_RETURN_IF_ERROR(
      Annotate(os::EnsurePrivateDirectory(path_, 0700), "sleep_directory"));
  OPTSTATE_RETURN_IF_ERROR(os::EnsurePrivateDirectory(path_ + kJobsName, 0700));
  OPTSTATE_ASSIGN_OR_RETURN(
      lock_, os::FileLock::Take(path_ + kLockName,
                                absl::StrCat("sleep directory ", path_)));
  return absl::OkStatus();
}

absl::Status SleepDirectory::CheckUsable() {
  if (path_.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this daemon has no directory for sleeping jobs: ", kSetOne));
  }
  if (!lock_.has_value()) OPTSTATE_RETURN_IF_ERROR(Take());
  if (!lock_->IsAt(path_ + kLockName)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "sleep_directory: ", path_,
        " is not the directory that it was when the daemon took it: a disk was "
        "mounted or unmounted there, or it was removed. Start the daemon "
        "again"));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const storage::TmpfsInfo info,
                            storage::InspectDirectory(path_));
  if (!info.is_tmpfs && !info.is_hugetlbfs) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      path_, " is on the ", info.file_system, " at ", info.mount_point,
      ", in memory itself, so that nothing would be given back: ", kSetOne));
}

std::vector<v1::SleepManifest> SleepDirectory::Jobs() const {
  std::vector<v1::SleepManifest> jobs;
  if (!lock_.has_value()) return jobs;
  for (const std::string& name : NamesIn(path_ + kJobsName)) {
    if (!accept::CheckJobName(name).ok()) continue;
    absl::StatusOr<v1::SleepManifest> manifest = ReadManifest(FolderOf(name));
    if (manifest.ok() && manifest->job() != name) {
      manifest = absl::FailedPreconditionError(
          absl::StrCat("it is of job ", manifest->job()));
    }
    if (manifest.ok()) {
      jobs.push_back(*std::move(manifest));
    } else {
      spdlog::error("{} has no sleeping job, left alone: {}", FolderOf(name),
                    manifest.status().ToString());
    }
  }
  return jobs;
}

std::string SleepDirectory::FolderOf(absl::string_view job) const {
  return path_.empty() ? "" : absl::StrCat(path_, kJobsName, "/", job);
}

}  // namespace optstate::supervisor
