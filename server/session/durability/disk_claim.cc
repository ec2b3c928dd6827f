#include "server/session/durability/disk_claim.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "spdlog/spdlog.h"
#include "storage/access_file.h"
#include "storage/disk_folder.h"
#include "storage/format/sealed_text.h"

namespace optstate::session {
namespace {

// Checks that a new job may have the folder, which is not its own yet.
absl::Status CheckFree(const std::string& folder, const std::string& device,
                       const std::string& job_directory) {
  if (storage::IsDurableFolder(folder)) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder,
        " has a durable job, which was not there when the engine started: was "
        "its disk mounted only then? Start the daemon again to go on with "
        "that job"));
  }
  if (storage::IsDiskFolderInUse(folder, job_directory, device)) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder,
        " has records of another job, whose state or engine may be "
        "there: ",
        folder, storage::kDiskMemoryFile,
        " says where. Use another name, or delete that job, or, if it is "
        "gone, remove ",
        folder));
  }
  return absl::OkStatus();
}

// Returns whether the folder says that it is of this incarnation, or, without
// one, says nothing.
bool IsOf(const std::string& folder, std::optional<uint64_t> incarnation) {
  const auto identity = storage::ReadDiskIdentity(folder);
  if (!identity.ok()) return false;
  if (!identity->has_value()) return !incarnation.has_value();
  return (*identity)->incarnation == incarnation;
}

// Removes what a claim leaves that ends before the folder says whose it is. A
// folder with anything else in it stays.
void RemoveUnfinished(const std::string& folder) {
  const auto identity = storage::ReadDiskIdentity(folder);
  if (!identity.ok() || identity->has_value()) return;
  ::unlink(absl::StrCat(folder, storage::kDiskIdentityFile, ".new").c_str());
  ::rmdir(folder.c_str());
}

// Removes a folder, last what says whose it is: an engine may die in the
// middle, and the next one goes on with it.
absl::Status RemoveFolder(const std::string& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> paths;
  for (std::filesystem::directory_iterator entry(folder, error), end;
       !error && entry != end; entry.increment(error)) {
    if (entry->path().string() == folder + storage::kDiskIdentityFile) continue;
    paths.push_back(entry->path());
  }
  for (const std::filesystem::path& path : paths) {
    if (!error) std::filesystem::remove_all(path, error);
  }
  if (!error) OPTSTATE_RETURN_IF_ERROR(storage::SyncFolder(folder));
  if (!error) std::filesystem::remove_all(folder, error);
  if (!error || error == std::errc::no_such_file_or_directory) {
    return absl::OkStatus();
  }
  return OsError(error.value(), absl::StrCat("remove ", folder));
}

// Each engine of a job does this: what is written already stays, but for the
// text of a former build, which has no seal.
absl::Status Identify(const std::string& folder,
                      const storage::DiskIdentity& identity) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<storage::DiskIdentity> now,
                            storage::ReadDiskIdentity(folder));
  const absl::StatusOr<std::string> text =
      storage::ReadDiskText(folder + storage::kDiskIdentityFile);
  if (now == identity && text.ok() && storage::IsSealed(*text)) {
    return absl::OkStatus();
  }
  return storage::WriteDiskIdentity(folder, identity);
}

absl::Status CheckHasRecords(const std::string& folder) {
  if (storage::HasRecords(folder)) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat(folder, storage::kDiskRecordsFile,
                   " is missing: is its disk mounted, and is the directory one "
                   "of those with which the job was made?"));
}

}  // namespace

absl::Status CheckDiskIdentities(const std::vector<std::string>& folders,
                                 std::optional<uint64_t> incarnation,
                                 uint32_t count) {
  const bool is_count_known = count != 0;
  for (size_t i = 0; i < folders.size(); ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(
        const std::optional<storage::DiskIdentity> identity,
        storage::ReadDiskIdentity(folders[i]));
    if (!identity.has_value()) continue;
    if (!incarnation.has_value()) incarnation = identity->incarnation;
    if (count == 0) count = identity->count;
    if (identity->incarnation != *incarnation) {
      // A directory that the job does not have may have anything.
      if (i >= count) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          folders[i], " belongs to another job of this name, of incarnation ",
          absl::Hex(identity->incarnation), ", not ", absl::Hex(*incarnation),
          ": is the right disk mounted there? Nothing was changed on it"));
    }
    // Left of a rearrangement, when the job had more directories or was to get
    // them: it has none of this number, wherever the folder is now.
    if (i >= count && identity->index >= count) continue;
    if (!is_count_known && identity->count > folders.size()) {
      return absl::FailedPreconditionError(absl::StrCat(
          folders[i], ": the job was made with ", identity->count,
          " nvme.directories, and this daemon has ", folders.size(),
          ": start optstated with those that it had, or take a state_dict "
          "with them and load it into a new job"));
    }
    if (identity->index != i) {
      return absl::FailedPreconditionError(absl::StrCat(
          folders[i], " is number ", identity->index + 1, " of the job's ",
          identity->count, " directories, and number ", i + 1,
          " of nvme.directories: start optstated with their former order"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDiskOwner(const std::string& folder, uint32_t owner) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<uint32_t> on_disk,
                            storage::ReadDiskOwner(folder));
  if (!on_disk.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder, " has a durable job, but ", folder, storage::kDiskOwnerFile,
        " is missing: write the uid of its owner to it"));
  }
  if (*on_disk == owner) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat(folder, " has a durable job of uid ", *on_disk,
                   ", and this one is of uid ", owner));
}

absl::Status ClaimDiskFolders(const std::vector<std::string>& folders,
                              const DiskClaim& claim) {
  if (!claim.is_new) {
    OPTSTATE_RETURN_IF_ERROR(CheckDiskIdentities(
        folders, claim.incarnation, static_cast<uint32_t>(folders.size())));
    if (storage::MayExist(folders[0] + storage::kDiskCommitsFile)) {
      OPTSTATE_RETURN_IF_ERROR(CheckDiskOwner(folders[0], claim.owner));
    }
  }
  for (size_t i = claim.first; i < folders.size(); ++i) {
    if (IsOf(folders[i], claim.incarnation)) continue;
    const std::string device =
        i < claim.devices.size() ? claim.devices[i] : std::string();
    OPTSTATE_RETURN_IF_ERROR(
        claim.is_new ? CheckFree(folders[i], device, claim.job_directory)
                     : CheckHasRecords(folders[i]));
  }
  for (uint32_t i = claim.first; i < folders.size(); ++i) {
    const auto count = static_cast<uint32_t>(folders.size());
    OPTSTATE_RETURN_IF_ERROR(
        storage::MakeFolder(folders[i].substr(0, folders[i].rfind('/'))));
    OPTSTATE_RETURN_IF_ERROR(storage::MakeFolder(folders[i]));
    OPTSTATE_RETURN_IF_ERROR(
        Identify(folders[i], {claim.incarnation, i, count}));
    OPTSTATE_RETURN_IF_ERROR(
        storage::WriteDiskMemory(folders[i], claim.job_directory));
  }
  if (claim.first > 0) return absl::OkStatus();
  // Before the owner: a job that is found by its owner has its access too.
  OPTSTATE_RETURN_IF_ERROR(
      storage::CopyAccess(claim.job_directory, folders[0], claim.is_new));
  return storage::WriteDurably(
      folders[0] + storage::kDiskOwnerFile,
      storage::SealText(absl::StrCat(claim.owner, "\n")));
}

void RemoveDiskFolders(const std::vector<std::string>& folders,
                       std::optional<uint64_t> incarnation) {
  for (const std::string& folder : folders) {
    if (!IsOf(folder, incarnation)) continue;
    const absl::Status removed = RemoveFolder(folder);
    if (!removed.ok()) spdlog::error("{}", removed.ToString());
  }
}

std::vector<std::string> FindOtherArrangements(const OwnArrangement& own) {
  const uint32_t other = own.number + 1;
  std::vector<std::string> found;
  const auto add = [&found](const std::string& path) {
    if (storage::MayExist(path)) found.push_back(path);
  };
  for (size_t i = 0; i < own.folders.size(); ++i) {
    const std::string& folder = own.folders[i];
    if (i >= own.count) {
      if (IsOf(folder, own.incarnation)) found.push_back(folder);
      continue;
    }
    add(folder + (other % 2 == 0 ? storage::kDiskRecordsFile
                                 : storage::kDiskOddRecordsFile));
    add(storage::DiskExtentPath(folder, other));
    if (i > 0) continue;
    add(absl::StrCat(folder, storage::kDiskCommitsFile, ".", other));
  }
  return found;
}

void RemoveOtherArrangements(const OwnArrangement& own) {
  for (uint32_t i = 0; i < own.folders.size(); ++i) {
    const std::string& folder = own.folders[i];
    if (i >= own.count) {
      RemoveUnfinished(folder);
      RemoveDiskFolders({folder}, own.incarnation);
      continue;
    }
    const absl::Status removed =
        storage::RemoveDiskExtent(folder, own.number + 1);
    if (!removed.ok()) spdlog::error("{}", removed.ToString());
  }
  for (const std::string& path : FindOtherArrangements(own)) {
    spdlog::error(
        "{} is not of the arrangement that the job's records have, and could "
        "not be removed: it takes space until its job is deleted or an engine "
        "of it can remove it. Is its disk read-only?",
        path);
  }
}

}  // namespace optstate::session
