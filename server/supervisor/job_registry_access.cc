// The part of the registry that knows who may use jobs.

#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/supervisor/job_registry.h"
#include "storage/access_file.h"
#include "storage/disk_folder.h"

namespace optstate::supervisor {
namespace {

// Brings the file of one folder into another, as it is, damage and all.
absl::Status RestoreAccess(const std::string& from, const std::string& to) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                            storage::ReadAccessText(from));
  if (!text.has_value()) return absl::OkStatus();
  return storage::WriteDurably(to + storage::kAccessFile, *text);
}

}  // namespace

const KnownAccess& JobRegistry::AccessOf(const std::string& name) const {
  static const auto* const nobody =
      new KnownAccess(UnknownAccess(absl::NotFoundError("there is no job")));
  const auto found = access_.find(name);
  return found == access_.end() ? *nobody : found->second;
}

void JobRegistry::LoadAccess(const std::string& name,
                             const std::vector<std::string>& copies) {
  const std::string own = JobDirectory(name);
  KnownAccess known = ReadAccess(own);
  for (const std::string& copy : copies) {
    if (copy.empty() || storage::MayExist(own + storage::kAccessFile)) break;
    const absl::Status restored = RestoreAccess(copy, own);
    // The copy is read itself: the directory may be one that cannot be made.
    known = restored.ok() ? ReadAccess(own) : ReadAccess(copy);
    if (restored.ok()) continue;
    spdlog::error("job {}: who may use it could not be copied from {}: {}",
                  name, copy, restored.ToString());
    break;
  }
  if (!known.problem.empty()) spdlog::error("job {}: {}", name, known.problem);
  access_[name] = std::move(known);
}

std::string JobRegistry::DiskAccessFolder(const std::string& name) const {
  std::string folder = disks_.FirstFolder(name);
  if (folder.empty()) return "";
  const absl::StatusOr<std::optional<uint32_t>> owner =
      storage::ReadDiskOwner(folder);
  const bool is_ours =
      owner.ok() && owner->has_value() && **owner == jobs_.find(name)->second;
  return is_ours ? folder : "";
}

void JobRegistry::SettleAccess(const std::string& name) {
  const std::string folder = DiskAccessFolder(name);
  if (folder.empty()) return;
  LoadAccess(name, {folder});
  const absl::Status copied = storage::CopyAccess(JobDirectory(name), folder,
                                                  /*is_taken_over=*/false);
  if (copied.ok()) return;
  spdlog::error("job {}: who may use it could not be copied to {}: {}", name,
                folder, copied.ToString());
}

absl::Status JobRegistry::SetAccess(const std::string& name,
                                    const v1::JobAccess& access) {
  OPTSTATE_RETURN_IF_ERROR(disks_.CheckInPlace());
  // That in memory is the first: see storage::CopyAccess.
  std::vector<std::string> folders = {JobDirectory(name)};
  const std::string sleep_folder = SleepFolder(name);
  if (!sleep_folder.empty()) {
    if (!storage::MayExist(sleep_folder)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job \"", name, "\" sleeps in ", sleep_folder,
          ", which is not there, and has to say who may use the job: mount its "
          "disk"));
    }
    folders.push_back(sleep_folder);
  }
  const std::string on_disk = DiskAccessFolder(name);
  if (!on_disk.empty()) folders.push_back(on_disk);
  const v1::JobAccess former = AccessOf(name).access;
  for (size_t i = 0; i < folders.size(); ++i) {
    const absl::Status written = WriteAccess(folders[i], access);
    if (written.ok()) continue;
    for (size_t k = 0; k <= i; ++k) {
      const absl::Status undone = WriteAccess(folders[k], former);
      if (!undone.ok()) spdlog::error("job {}: {}", name, undone.ToString());
    }
    return Annotate(
        written,
        absl::StrCat("job \"", name, "\": who may use it stays as it was"));
  }
  access_[name] = {.access = access, .problem = ""};
  return absl::OkStatus();
}

}  // namespace optstate::supervisor
