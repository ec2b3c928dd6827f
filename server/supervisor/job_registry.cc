#include "server/supervisor/job_registry.h"

#include <dirent.h>
#include <spdlog/spdlog.h>
#include <stdio.h>
#include <sys/stat.h>

#include <cerrno>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/os/private_directory.h"
#include "server/os/small_file.h"
#include "server/supervisor/sleep/sleep_manifest.h"
#include "storage/access_file.h"
#include "storage/disk_folder.h"
#include "storage/state_folder.h"

namespace optstate::supervisor {
namespace {

constexpr absl::string_view kNewPrefix = ".new-";
constexpr absl::string_view kDeletedPrefix = ".deleted-";
constexpr absl::string_view kOwnerFile = "owner";
constexpr absl::string_view kFrameTable = "/frame_table";

absl::StatusOr<std::vector<std::string>> ListDirectory(
    const std::string& path) {
  DIR* directory = ::opendir(path.c_str());
  if (directory == nullptr) return OsError(errno, absl::StrCat("open ", path));
  const absl::Cleanup close = [directory] { ::closedir(directory); };
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(directory)) {
    const absl::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  return names;
}

absl::StatusOr<uid_t> ReadOwner(const std::string& job_directory) {
  const std::string path = absl::StrCat(job_directory, "/", kOwnerFile);
  OPTSTATE_ASSIGN_OR_RETURN(const std::string text,
                            os::ReadSmallFile(path, 32));
  uid_t uid = 0;
  if (absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &uid)) return uid;
  return absl::DataLossError(absl::StrCat(path, " holds no uid"));
}

// Returns why a job must not be begun where the folder of a sleeping one of its
// name is: a rank that expects its job to wake would train from the beginning.
absl::Status CheckNoneSleeps(const std::string& folder,
                             const std::string& name) {
  if (folder.empty() || !storage::MayExist(folder)) return absl::OkStatus();
  const absl::Status readable = ReadManifest(folder).status();
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", name, "\" may be asleep in ", folder,
      ", which this daemon could not list",
      readable.ok() ? "" : absl::StrCat(" (", readable.message(), ")"),
      ": mend that and start the daemon again; or, when that job is lost, "
      "remove ",
      folder));
}

// The folders that may have a sleeping job's copy of its file `access`. The
// second one is where a former build puts it.
std::vector<std::string> SleepCopies(const std::string& folder) {
  return {folder, folder + kFilesFolder};
}

// Has the folder in which a job sleeps say what its directory says: a daemon
// may have died when it had changed that in memory alone, and after a reboot
// the folder is what counts.
void SettleSleepCopy(const std::string& name, const std::string& directory,
                     const std::string& folder) {
  // Its disk may be one that is not mounted.
  if (!storage::MayExist(folder)) return;
  const absl::Status copied =
      storage::CopyAccess(directory, folder, /*is_taken_over=*/false);
  if (copied.ok()) return;
  spdlog::error("job {}: who may use it could not be copied to {}: {}", name,
                folder, copied.ToString());
}

}  // namespace

absl::StatusOr<JobRegistry> JobRegistry::Open(const std::string& directory) {
  OPTSTATE_RETURN_IF_ERROR(os::EnsurePrivateDirectory(directory, 0700));
  JobRegistry registry(directory);
  OPTSTATE_RETURN_IF_ERROR(registry.Load());
  return registry;
}

absl::Status JobRegistry::Load() {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            ListDirectory(directory_));
  for (const std::string& name : names) LoadEntry(name);
  return absl::OkStatus();
}

void JobRegistry::LoadEntry(const std::string& name) {
  const std::string path = JobDirectory(name);
  if (absl::StartsWith(name, kNewPrefix) ||
      absl::StartsWith(name, kDeletedPrefix)) {
    const absl::Status removed = os::RemoveTree(path);
    spdlog::info("removed {}, left half done by a crash: {}", path,
                 removed.ToString());
    return;
  }
  const absl::StatusOr<uid_t> owner = ReadOwner(path);
  if (!accept::CheckJobName(name).ok() || !owner.ok()) {
    spdlog::warn("{} is not a job's directory, left alone: {}", path,
                 owner.status().ToString());
    return;
  }
  jobs_[name] = *owner;
  LoadAccess(name);
}

void JobRegistry::UseSleepDirectory(SleepDirectory sleep) {
  sleep_ = std::move(sleep);
  CopyControl control;
  for (const auto& [name, owner] : jobs_) {
    const SleepPlace place = {.job = name,
                              .uid = owner,
                              .job_directory = JobDirectory(name),
                              .folder = sleep_.FolderOf(name)};
    const absl::Status settled = SettleSleep(place, &control).status();
    if (!settled.ok()) spdlog::error("job {}: {}", name, settled.ToString());
    const std::string folder = SleepFolder(name);
    if (folder.empty()) continue;
    LoadAccess(name, SleepCopies(folder));
    SettleSleepCopy(name, JobDirectory(name), folder);
  }
  for (const v1::SleepManifest& manifest : sleep_.Jobs()) {
    const std::string& name = manifest.job();
    if (jobs_.contains(name)) continue;
    const absl::Status made =
        MakeDirectory(name, manifest.uid(), sleep_.FolderOf(name));
    if (made.ok()) {
      jobs_[name] = manifest.uid();
      LoadAccess(name, SleepCopies(sleep_.FolderOf(name)));
      spdlog::info("job {}: found asleep", name);
    } else {
      spdlog::error("job {}: found asleep, and cannot be listed: {}", name,
                    made.ToString());
    }
  }
}

std::string JobRegistry::SleepFolder(const std::string& name) const {
  const absl::StatusOr<std::string> folder =
      storage::ReadDiskText(JobDirectory(name) + kAsleepFile);
  return folder.ok() ? *folder : "";
}

SleepPlace JobRegistry::SleepPlaceOf(const std::string& name) const {
  return {.job = name,
          .uid = jobs_.at(name),
          .job_directory = JobDirectory(name),
          .folder = SleepFolder(name)};
}

absl::StatusOr<SleepPlace> JobRegistry::FindSleepPlace(
    const std::string& name) {
  OPTSTATE_RETURN_IF_ERROR(CheckDisksOf(name));
  OPTSTATE_RETURN_IF_ERROR(sleep_.CheckUsable());
  SleepPlace place = SleepPlaceOf(name);
  place.folder = sleep_.FolderOf(name);
  return place;
}

void JobRegistry::UseDisks(DiskDirectories disks) {
  disks_ = std::move(disks);
  for (const auto& [name, owner] : jobs_) {
    if (SleepFolder(name).empty()) disks_.ForgetSleep(name);
    SettleAccess(name);
  }
  for (const auto& [name, owner] : disks_.DurableJobs()) {
    const auto found = jobs_.find(name);
    if (found != jobs_.end()) {
      if (found->second == owner) continue;
      spdlog::error("job {}: of uid {}, and on disk of uid {}", name,
                    found->second, owner);
      continue;
    }
    // Its last durable step may be older than what sleeps.
    const absl::Status awake = disks_.CheckNotAsleep(name);
    if (!awake.ok()) {
      spdlog::error("left alone: {}", awake.ToString());
      continue;
    }
    jobs_[name] = owner;
    const absl::Status made = MakeDirectory(name, owner);
    LoadAccess(name, {disks_.FirstFolder(name)});
    if (made.ok()) {
      spdlog::info("job {}: found on disk", name);
    } else {
      spdlog::error("job {}: found on disk, and cannot be started: {}", name,
                    made.ToString());
    }
  }
  // A job that was never durable ended with the memory.
  disks_.RemoveEnded(
      [this](const std::string& name) { return jobs_.contains(name); });
}

absl::Status JobRegistry::MakeMissingDirectory(const std::string& name) {
  const auto found = jobs_.find(name);
  if (found == jobs_.end() || storage::MayExist(JobDirectory(name)) ||
      !disks_.IsDurable(name)) {
    return absl::OkStatus();
  }
  OPTSTATE_RETURN_IF_ERROR(MakeDirectory(name, found->second));
  LoadAccess(name, {DiskAccessFolder(name)});
  return absl::OkStatus();
}

bool JobRegistry::UsesDisk(const std::string& name) const {
  return storage::MayExist(absl::StrCat(JobDirectory(name),
                                        storage::kStateFolder, kFrameTable)) ||
         disks_.HasFolder(name);
}

absl::Status JobRegistry::CheckDisksOf(const std::string& name) const {
  return UsesDisk(name) ? disks_.CheckInPlace() : absl::OkStatus();
}

std::string JobRegistry::JobDirectory(absl::string_view name) const {
  return absl::StrCat(directory_, "/", name);
}

absl::Status JobRegistry::Create(const std::string& name, uid_t owner,
                                 const v1::JobAccess& access) {
  if (jobs_.contains(name)) {
    return absl::AlreadyExistsError(absl::StrCat("job \"", name, "\" exists"));
  }
  OPTSTATE_RETURN_IF_ERROR(disks_.CheckMayCreate(name, owner));
  OPTSTATE_RETURN_IF_ERROR(CheckNoneSleeps(sleep_.FolderOf(name), name));
  OPTSTATE_RETURN_IF_ERROR(
      MakeDirectory(name, owner, /*sleep_folder=*/"", access));
  jobs_[name] = owner;
  access_[name] = {.access = access, .problem = ""};
  return absl::OkStatus();
}

absl::Status JobRegistry::MakeDirectory(const std::string& name, uid_t owner,
                                        const std::string& sleep_folder,
                                        const v1::JobAccess& access) const {
  const std::string fresh = JobDirectory(absl::StrCat(kNewPrefix, name));
  OPTSTATE_RETURN_IF_ERROR(os::RemoveTree(fresh));
  if (::mkdir(fresh.c_str(), 0700) != 0) {
    return OsError(errno, absl::StrCat("mkdir ", fresh));
  }
  absl::Cleanup remove = [&fresh] { (void)os::RemoveTree(fresh); };
  OPTSTATE_RETURN_IF_ERROR(os::CreateSmallFile(
      absl::StrCat(fresh, "/", kOwnerFile), absl::StrCat(owner, "\n")));
  if (access.ByteSizeLong() != 0) {
    OPTSTATE_RETURN_IF_ERROR(WriteAccess(fresh, access));
  }
  if (!sleep_folder.empty()) {
    OPTSTATE_RETURN_IF_ERROR(MarkAsleep(fresh, sleep_folder));
  }
  const std::string path = JobDirectory(name);
  // The rename fails when a non-empty directory has the name already.
  if (::rename(fresh.c_str(), path.c_str()) != 0) {
    return OsError(errno, absl::StrCat("rename ", fresh, " to ", path));
  }
  std::move(remove).Cancel();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> JobRegistry::Discard(
    const std::string& name) {
  if (!jobs_.contains(name)) {
    return absl::NotFoundError(absl::StrCat("no job \"", name, "\""));
  }
  const bool uses_disk = UsesDisk(name);
  const std::string sleep_folder = SleepFolder(name);
  const std::string path = JobDirectory(name);
  std::string discarded =
      JobDirectory(absl::StrCat(kDeletedPrefix, ++discarded_));
  if (::rename(path.c_str(), discarded.c_str()) != 0 && errno != ENOENT) {
    return OsError(errno, absl::StrCat("rename ", path, " to ", discarded));
  }
  std::vector<std::string> all;
  if (!sleep_folder.empty()) {
    const absl::StatusOr<std::string> old = DiscardFolder(sleep_folder);
    if (old.ok()) {
      all.push_back(*old);
    } else if (!absl::IsNotFound(old.status())) {
      ::rename(discarded.c_str(), path.c_str());
      return old.status();
    }
  }
  if (uses_disk) {
    auto on_disks = disks_.Discard(name);
    if (!on_disks.ok()) {
      // After a failed delete the job is whole. Memory is the last to go and to
      // come back, for it names the folder in which the job sleeps.
      if (!all.empty()) {
        const absl::Status back = TakeBackFolder(sleep_folder);
        if (!back.ok()) spdlog::error("{}", back.ToString());
      }
      ::rename(discarded.c_str(), path.c_str());
      return on_disks.status();
    }
    all.insert(all.end(), on_disks->begin(), on_disks->end());
  }
  all.push_back(std::move(discarded));
  jobs_.erase(name);
  access_.erase(name);
  return all;
}

}  // namespace optstate::supervisor
