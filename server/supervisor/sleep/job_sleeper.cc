#include "server/supervisor/sleep/job_sleeper.h"

#include <spdlog/spdlog.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "proto/types/version.h"
#include "server/os/private_directory.h"
#include "server/supervisor/sleep/file_copier.h"
#include "server/supervisor/sleep/sleep_manifest.h"
#include "storage/access_file.h"
#include "storage/disk_folder.h"
#include "storage/state_folder.h"

namespace optstate::supervisor {
namespace {

// The marker before it counts: it is written first of all, so that a full
// memory cannot keep it from being written when the copy is there.
constexpr char kMarkerToBe[] = "/asleep.new";
// Files of a job's directory that stay while it sleeps, or are made anew.
constexpr absl::string_view kOwnerName = "owner";
constexpr absl::string_view kAsleepName = "asleep";
constexpr absl::string_view kAccessName = "access";
constexpr absl::string_view kMarkerToBeName = "asleep.new";
constexpr absl::string_view kLockName = "lock";
// Left free on the disk: for the file system's own blocks, and the manifest.
constexpr uint64_t kSpareBytes = uint64_t{16} << 20;

std::string ParentOf(const std::string& path) {
  return path.substr(0, path.rfind('/'));
}
absl::string_view NameOf(absl::string_view path) {
  return path.substr(path.rfind('/') + 1);
}
std::string Sibling(const std::string& folder, absl::string_view prefix) {
  return absl::StrCat(ParentOf(folder), "/", prefix, NameOf(folder));
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return OsError(errno, absl::StrCat("rename ", from, " to ", to));
}

absl::Status Unlink(const std::string& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return OsError(errno, absl::StrCat("remove ", path));
}

// Lists the files of a job's directory that are to be copied, by path below it.
absl::StatusOr<std::vector<std::string>> ListFiles(
    const std::string& directory) {
  std::vector<std::string> files;
  std::error_code error;
  std::filesystem::recursive_directory_iterator entry(directory, error);
  const std::filesystem::recursive_directory_iterator end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string path = entry->path().string();
    const std::string below = path.substr(directory.size() + 1);
    const std::filesystem::file_status status = entry->symlink_status(error);
    if (error) break;
    if (below == kOwnerName || below == kAccessName || below == kLockName ||
        below == kMarkerToBeName || std::filesystem::is_directory(status) ||
        std::filesystem::is_socket(status)) {
      continue;
    }
    if (!std::filesystem::is_regular_file(status)) {
      return absl::FailedPreconditionError(absl::StrCat(
          path,
          " is no file that an engine makes: remove it, then put the job "
          "to sleep"));
    }
    files.push_back(below);
  }
  if (error) {
    return OsError(error.value(), absl::StrCat("list ", directory));
  }
  std::sort(files.begin(), files.end());
  return files;
}

absl::StatusOr<v1::SleepManifest> DescribeJob(const SleepPlace& place) {
  v1::SleepManifest manifest;
  manifest.set_format(kSleepFormat);
  manifest.set_job(place.job);
  manifest.set_uid(place.uid);
  manifest.set_job_directory(place.job_directory);
  manifest.set_daemon_version(std::string(kVersion));
  manifest.mutable_slept_at()->set_seconds(absl::ToUnixSeconds(absl::Now()));
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                            ListFiles(place.job_directory));
  for (const std::string& path : files) {
    OPTSTATE_ASSIGN_OR_RETURN(
        *manifest.add_files(),
        DescribeFile(absl::StrCat(place.job_directory, "/", path)));
    manifest.mutable_files(manifest.files_size() - 1)->set_path(path);
  }
  return manifest;
}

absl::Status CheckDiskRoom(const std::string& directory, uint64_t bytes) {
  struct statvfs info;
  if (::statvfs(directory.c_str(), &info) != 0) {
    return OsError(errno, absl::StrCat("statvfs of ", directory));
  }
  const uint64_t left = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  if (left >= bytes + kSpareBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      directory, ": the job needs ", bytes + kSpareBytes, " bytes, ", left,
      " are left; make room on that disk, or set sleep_directory to another"));
}

// Returns the folders of the files, each after the one that it is in.
std::set<std::string> FoldersOf(const v1::SleepManifest& manifest) {
  std::set<std::string> folders;
  for (const v1::SleepFile& file : manifest.files()) {
    const std::string& path = file.path();
    for (size_t slash = path.find('/'); slash != std::string::npos;
         slash = path.find('/', slash + 1)) {
      folders.insert(path.substr(0, slash));
    }
  }
  return folders;
}

absl::Status MakeFolders(const std::string& root,
                         const v1::SleepManifest& manifest,
                         CopyControl* control) {
  for (const std::string& folder : FoldersOf(manifest)) {
    const std::string path = absl::StrCat(root, "/", folder);
    OPTSTATE_RETURN_IF_ERROR(control->Before("mkdir", path));
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
      return OsError(errno, absl::StrCat("mkdir ", path));
    }
  }
  return absl::OkStatus();
}

// Writes all of the folder, durably; the manifest last.
absl::Status WriteFolder(const SleepPlace& place, const std::string& folder,
                         v1::SleepManifest* manifest, CopyControl* control) {
  const std::string root = folder + kFilesFolder;
  for (const std::string& path : {folder, root}) {
    OPTSTATE_RETURN_IF_ERROR(control->Before("mkdir", path));
    OPTSTATE_RETURN_IF_ERROR(storage::MakeFolder(path));
  }
  OPTSTATE_RETURN_IF_ERROR(MakeFolders(root, *manifest, control));
  for (v1::SleepFile& file : *manifest->mutable_files()) {
    OPTSTATE_RETURN_IF_ERROR(
        CopyToDisk(absl::StrCat(place.job_directory, "/", file.path()),
                   absl::StrCat(root, "/", file.path()), &file, control));
  }
  std::set<std::string> folders = FoldersOf(*manifest);
  for (const std::string& below : folders) {
    const std::string path = absl::StrCat(root, "/", below);
    OPTSTATE_RETURN_IF_ERROR(control->Before("sync folder", path));
    OPTSTATE_RETURN_IF_ERROR(storage::SyncFolder(path));
  }
  OPTSTATE_RETURN_IF_ERROR(control->Before("sync folder", root));
  OPTSTATE_RETURN_IF_ERROR(storage::SyncFolder(root));
  // Access to the job can change while it sleeps: it is not in the manifest.
  OPTSTATE_RETURN_IF_ERROR(control->Before("write access", folder));
  OPTSTATE_RETURN_IF_ERROR(storage::CopyAccess(place.job_directory, folder,
                                               /*is_taken_over=*/true));
  OPTSTATE_RETURN_IF_ERROR(control->Before("write manifest", folder));
  return WriteManifest(folder, *manifest);
}

// Removes all of the directory but what a sleeping job keeps there.
absl::Status RemoveFiles(const std::string& job_directory,
                         CopyControl* control) {
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(job_directory, error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name != kOwnerName && name != kAccessName && name != kAsleepName) {
      paths.push_back(entry->path().string());
    }
  }
  if (error) {
    return OsError(error.value(), absl::StrCat("list ", job_directory));
  }
  for (const std::string& path : paths) {
    OPTSTATE_RETURN_IF_ERROR(control->Before("remove", path));
    OPTSTATE_RETURN_IF_ERROR(os::RemoveTree(path));
  }
  return absl::OkStatus();
}

// Does PutToSleep() up to the point at which the folder is the job.
absl::StatusOr<v1::SleepManifest> CopyJob(
    const SleepPlace& place, const std::function<absl::Status()>& sync_records,
    CopyControl* control) {
  const std::string fresh = Sibling(place.folder, kNewSleepPrefix);
  OPTSTATE_RETURN_IF_ERROR(os::RemoveTree(fresh));
  OPTSTATE_ASSIGN_OR_RETURN(v1::SleepManifest manifest, DescribeJob(place));
  control->bytes_total = DiskBytes(manifest);
  OPTSTATE_RETURN_IF_ERROR(
      CheckDiskRoom(ParentOf(place.folder), DiskBytes(manifest)));
  const std::string marker = place.job_directory + kMarkerToBe;
  OPTSTATE_RETURN_IF_ERROR(control->Before("write marker", marker));
  OPTSTATE_RETURN_IF_ERROR(storage::WriteDurably(marker, place.folder));
  OPTSTATE_RETURN_IF_ERROR(control->Before("sync records", place.job));
  OPTSTATE_RETURN_IF_ERROR(sync_records());
  absl::Cleanup remove = [&fresh] { (void)os::RemoveTree(fresh); };
  OPTSTATE_RETURN_IF_ERROR(WriteFolder(place, fresh, &manifest, control));
  OPTSTATE_RETURN_IF_ERROR(control->Before("rename", place.folder));
  OPTSTATE_RETURN_IF_ERROR(Rename(fresh, place.folder));
  std::move(remove).Cancel();
  OPTSTATE_RETURN_IF_ERROR(
      control->Before("sync folder", ParentOf(place.folder)));
  OPTSTATE_RETURN_IF_ERROR(storage::SyncFolder(ParentOf(place.folder)));
  OPTSTATE_RETURN_IF_ERROR(control->Before("mark", marker));
  OPTSTATE_RETURN_IF_ERROR(Rename(marker, place.job_directory + kAsleepFile));
  return manifest;
}

// Removes the folder of a job that goes on in memory.
absl::Status RemoveFolder(const std::string& folder, CopyControl* control) {
  if (!storage::MayExist(folder)) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(control->Before("discard", folder));
  OPTSTATE_ASSIGN_OR_RETURN(const std::string old, DiscardFolder(folder));
  const absl::Status removed = os::RemoveTree(old);
  if (!removed.ok()) spdlog::warn("{}", removed.ToString());
  return absl::OkStatus();
}

absl::Status CheckIsOf(const SleepPlace& place,
                       const v1::SleepManifest& manifest) {
  if (manifest.job() == place.job && manifest.uid() == place.uid) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      place.folder, " is of job \"", manifest.job(), "\" of uid ",
      manifest.uid(), ", not of job \"", place.job, "\" of uid ", place.uid));
}

// Has the files in memory be of the present start of the machine, whichever the
// one was before the job slept.
absl::Status WriteBoot(const SleepPlace& place, CopyControl* control) {
  const absl::StatusOr<std::string> boot = storage::ReadBootId();
  if (!boot.ok()) return absl::OkStatus();  // a sandbox without /proc
  const std::string path = place.job_directory + storage::kBootFile;
  OPTSTATE_RETURN_IF_ERROR(control->Before("write boot", path));
  return storage::WriteDurably(path, *boot);
}

absl::Status CopyAllBack(const SleepPlace& place,
                         const v1::SleepManifest& manifest,
                         const AdmitWaking& admit, CopyControl* control) {
  std::vector<UniqueFd> fds;
  const auto make_files = [&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(
        MakeFolders(place.job_directory, manifest, control));
    for (const v1::SleepFile& file : manifest.files()) {
      OPTSTATE_ASSIGN_OR_RETURN(
          UniqueFd fd,
          MakeFile(absl::StrCat(place.job_directory, "/", file.path()), file,
                   control));
      fds.push_back(std::move(fd));
    }
    return absl::OkStatus();
  };
  OPTSTATE_RETURN_IF_ERROR(admit(manifest, make_files));
  for (size_t i = 0; i < fds.size(); ++i) {
    const v1::SleepFile& file = manifest.files(static_cast<int>(i));
    OPTSTATE_RETURN_IF_ERROR(
        CopyBack(absl::StrCat(place.folder, kFilesFolder, "/", file.path()),
                 file, fds[i].get(), control));
  }
  return WriteBoot(place, control);
}

// Has the memory be the job instead of the folder.
absl::Status SwitchToMemory(const SleepPlace& place, CopyControl* control) {
  const std::string marker = place.job_directory + kAsleepFile;
  OPTSTATE_RETURN_IF_ERROR(control->Before("unmark", marker));
  OPTSTATE_RETURN_IF_ERROR(Unlink(marker));
  OPTSTATE_RETURN_IF_ERROR(control->Before("sync folder", place.job_directory));
  OPTSTATE_RETURN_IF_ERROR(storage::SyncFolder(place.job_directory));
  OPTSTATE_RETURN_IF_ERROR(control->Before("discard", place.folder));
  return DiscardFolder(place.folder).status();
}

// Leaves out the file that says who may use the job, which a former build has
// copied as any other: it is in the directory already, and may have changed.
void LeaveOutAccess(v1::SleepManifest* manifest) {
  for (int i = 0; i < manifest->files_size(); ++i) {
    if (manifest->files(i).path() != kAccessName) continue;
    manifest->mutable_files()->DeleteSubrange(i, 1);
    return;
  }
}

absl::StatusOr<v1::SleepManifest> ReadManifestOf(const SleepPlace& place) {
  absl::StatusOr<v1::SleepManifest> manifest = ReadManifest(place.folder);
  if (absl::IsNotFound(manifest.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", place.job, "\" sleeps in ", place.folder,
        ", which is not there: mount its disk, or delete the job (optctl "
        "delete job ",
        place.job, ")"));
  }
  OPTSTATE_RETURN_IF_ERROR(manifest.status());
  OPTSTATE_RETURN_IF_ERROR(CheckIsOf(place, *manifest));
  return manifest;
}

// Checks that the folder was written of this directory of this job.
absl::Status CheckIsOfDirectory(const SleepPlace& place) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SleepManifest manifest,
                            ReadManifest(place.folder));
  OPTSTATE_RETURN_IF_ERROR(CheckIsOf(place, manifest));
  if (manifest.job_directory() == place.job_directory) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(place.folder, " is of ", manifest.job_directory()));
}

// Returns whether the files are surely of a former start of the machine.
bool IsOfFormerBoot(const std::string& job_directory) {
  const absl::StatusOr<std::string> boot = storage::ReadBootId();
  const absl::StatusOr<std::string> noted =
      storage::ReadDiskText(job_directory + storage::kBootFile);
  return boot.ok() && noted.ok() && *boot != *noted;
}

}  // namespace

std::string OldFolder(const std::string& folder) {
  return Sibling(folder, kOldSleepPrefix);
}

bool IsAsleep(const SleepPlace& place) {
  return storage::MayExist(place.job_directory + kAsleepFile) ||
         (!place.folder.empty() && CheckIsOfDirectory(place).ok());
}

absl::Status MarkAsleep(const std::string& job_directory,
                        const std::string& folder) {
  return storage::WriteDurably(job_directory + kAsleepFile, folder);
}

absl::StatusOr<std::string> DiscardFolder(const std::string& folder) {
  std::string old = OldFolder(folder);
  OPTSTATE_RETURN_IF_ERROR(os::RemoveTree(old));
  OPTSTATE_RETURN_IF_ERROR(Rename(folder, old));
  const absl::Status synced = storage::SyncFolder(ParentOf(folder));
  if (synced.ok()) return old;
  // The next start of the machine may find either name.
  (void)Rename(old, folder);
  return synced;
}

absl::Status TakeBackFolder(const std::string& folder) {
  OPTSTATE_RETURN_IF_ERROR(Rename(OldFolder(folder), folder));
  return storage::SyncFolder(ParentOf(folder));
}

absl::StatusOr<v1::SleepManifest> PutToSleep(
    const SleepPlace& place, const std::function<absl::Status()>& sync_records,
    CopyControl* control) {
  if (storage::MayExist(place.folder)) {
    return absl::FailedPreconditionError(absl::StrCat(
        place.folder,
        " is there, and is not of this job as it is now: move it away"));
  }
  absl::StatusOr<v1::SleepManifest> manifest =
      CopyJob(place, sync_records, control);
  if (!manifest.ok()) {
    absl::Status undone = RemoveFolder(place.folder, control);
    undone.Update(Unlink(place.job_directory + kMarkerToBe));
    if (!undone.ok()) spdlog::error("job {}: {}", place.job, undone.ToString());
    return manifest.status();
  }
  // No file may be gone before the marker is there for good, for a directory
  // that is not in memory.
  absl::Status removed = storage::SyncFolder(place.job_directory);
  if (removed.ok()) removed = RemoveFiles(place.job_directory, control);
  if (removed.ok()) return manifest;
  return Annotate(removed, absl::StrCat("job \"", place.job,
                                        "\" is asleep, but its memory is not "
                                        "given back"));
}

absl::Status Wake(const SleepPlace& place, const AdmitWaking& admit,
                  CopyControl* control) {
  OPTSTATE_ASSIGN_OR_RETURN(v1::SleepManifest manifest, ReadManifestOf(place));
  if (storage::MayExist(place.job_directory + storage::kAccessFile)) {
    LeaveOutAccess(&manifest);
  }
  control->bytes_total = DiskBytes(manifest);
  // No file may be removed, such as an interrupted call has left, while the
  // marker does not say that the directory is not the job.
  if (!storage::MayExist(place.job_directory + kAsleepFile)) {
    OPTSTATE_RETURN_IF_ERROR(MarkAsleep(place.job_directory, place.folder));
  }
  OPTSTATE_RETURN_IF_ERROR(RemoveFiles(place.job_directory, control));
  absl::Status status = CopyAllBack(place, manifest, admit, control);
  if (status.ok()) status = SwitchToMemory(place, control);
  // Without the folder the memory is the job, although its name was not synced.
  if (status.ok() || !storage::MayExist(place.folder)) return status;
  absl::Status undone;
  if (!storage::MayExist(place.job_directory + kAsleepFile)) {
    undone = MarkAsleep(place.job_directory, place.folder);
  }
  if (undone.ok()) undone = RemoveFiles(place.job_directory, control);
  if (!undone.ok()) spdlog::error("job {}: {}", place.job, undone.ToString());
  return status;
}

absl::StatusOr<std::string> SettleSleep(const SleepPlace& place,
                                        CopyControl* control) {
  const std::string marker = place.job_directory + kAsleepFile;
  if (storage::MayExist(marker)) {
    OPTSTATE_ASSIGN_OR_RETURN(const std::string text,
                              storage::ReadDiskText(marker));
    OPTSTATE_RETURN_IF_ERROR(RemoveFiles(place.job_directory, control));
    return std::string(absl::StripAsciiWhitespace(text));
  }
  OPTSTATE_RETURN_IF_ERROR(Unlink(place.job_directory + kMarkerToBe));
  if (place.folder.empty() || !storage::MayExist(place.folder)) return "";
  const absl::Status is_ours = CheckIsOfDirectory(place);
  if (!is_ours.ok()) {
    spdlog::error("job {} is awake, and {} is left alone: {}", place.job,
                  place.folder, is_ours.ToString());
    return "";
  }
  if (!IsOfFormerBoot(place.job_directory)) {
    const absl::Status dropped = RemoveFolder(place.folder, control);
    if (dropped.ok()) return "";
    // No engine may run beside the folder.
    spdlog::error("job {} is left asleep: {}", place.job, dropped.ToString());
  }
  OPTSTATE_RETURN_IF_ERROR(control->Before("mark", marker));
  OPTSTATE_RETURN_IF_ERROR(MarkAsleep(place.job_directory, place.folder));
  OPTSTATE_RETURN_IF_ERROR(RemoveFiles(place.job_directory, control));
  return place.folder;
}

}  // namespace optstate::supervisor
