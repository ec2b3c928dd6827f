#include "storage/host_tier.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "storage/state_folder.h"

namespace optstate::storage {
namespace {

constexpr char kUnfinishedFolder[] = "/state.tmp";

absl::Status RemoveFolder(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (!error) return absl::OkStatus();
  return OsError(error.value(), absl::StrCat("remove ", path));
}

uint64_t NewIncarnation() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;  // never 0
}

// The files fit together only if they were made for this layout; the hash is
// computed anew from the description's payload by its parser.
absl::Status CheckHash(const CheckedFile& description, const Layout& layout) {
  if (description.layout_hash == layout.hash()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("job.binpb: layout hash is ",
                   absl::BytesToHexString(description.layout_hash),
                   ", its layout gives ", absl::BytesToHexString(layout.hash()),
                   ": written by another version of optstated?"));
}

}  // namespace

uint64_t HostTier::BytesNeeded(const Layout& layout, const HostArrays& arrays) {
  return JobFiles::BytesNeeded(layout, arrays.accumulation) +
         HostArrayFiles::BytesNeeded(layout, arrays);
}

absl::StatusOr<CheckedFile> HostTier::ReadDescription(
    const std::string& directory) {
  OPTSTATE_RETURN_IF_ERROR(RemoveFolder(directory + kUnfinishedFolder));
  absl::StatusOr<CheckedFile> description =
      JobFiles::ReadDescription(directory + kStateFolder);
  if (!absl::IsNotFound(description.status())) return description;
  return absl::NotFoundError(absl::StrCat("no job in ", directory));
}

absl::StatusOr<HostTier> HostTier::Create(const std::string& directory,
                                          const Layout& layout,
                                          const HostArrays& arrays,
                                          const std::string& description,
                                          uint64_t incarnation) {
  const std::string unfinished = directory + kUnfinishedFolder;
  const std::string finished = directory + kStateFolder;
  OPTSTATE_RETURN_IF_ERROR(RemoveFolder(unfinished));
  if (::mkdir(unfinished.c_str(), 0700) != 0) {
    return OsError(errno, absl::StrCat("mkdir ", unfinished));
  }
  if (incarnation == 0) incarnation = NewIncarnation();
  absl::Status status =
      CreateFiles(unfinished, layout, arrays, description, incarnation);
  if (status.ok() && ::rename(unfinished.c_str(), finished.c_str()) != 0) {
    status = OsError(errno, absl::StrCat("rename to ", finished));
  }
  if (!status.ok()) {
    RemoveFolder(unfinished).IgnoreError();  // removed at the next open at last
    return status;
  }
  // The paths within say state.tmp; opening again costs little and checks.
  return OpenFiles(finished, layout, arrays, incarnation);
}

absl::Status HostTier::CreateFiles(const std::string& folder,
                                   const Layout& layout,
                                   const HostArrays& arrays,
                                   const std::string& description,
                                   uint64_t incarnation) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const JobFiles files,
      JobFiles::Create(folder, layout, arrays.accumulation, incarnation));
  HostArrayFiles array_files(folder);
  OPTSTATE_RETURN_IF_ERROR(array_files.Create(layout, arrays));
  return files.WriteDescription(layout, description);
}

absl::Status HostTier::Remove(const std::string& directory) {
  return RemoveFolder(directory + kStateFolder);
}

absl::StatusOr<HostTier> HostTier::Open(const std::string& directory,
                                        const Layout& layout,
                                        const HostArrays& arrays,
                                        const CheckedFile& description) {
  OPTSTATE_RETURN_IF_ERROR(CheckHash(description, layout));
  return OpenFiles(directory + kStateFolder, layout, arrays,
                   description.incarnation);
}

absl::StatusOr<HostTier> HostTier::OpenFiles(const std::string& folder,
                                             const Layout& layout,
                                             const HostArrays& arrays,
                                             uint64_t incarnation) {
  OPTSTATE_ASSIGN_OR_RETURN(
      JobFiles files,
      JobFiles::Open(folder, layout, arrays.accumulation, incarnation));
  HostArrayFiles array_files(folder);
  OPTSTATE_RETURN_IF_ERROR(array_files.Open(layout, arrays));
  return HostTier(std::move(files), std::move(array_files));
}

absl::Status HostTier::Reshape(const Layout& layout, const HostArrays& arrays,
                               const StepFileBytes& step_files,
                               const std::string& description) {
  const ArrayFiles::Extents arrays_before = arrays_.extents();
  const JobFiles::Extents files_before = files_.extents();
  absl::Status status = arrays_.Resize(layout, arrays);
  if (status.ok()) {
    status = files_.Resize(layout, arrays.accumulation, step_files);
  }
  // The point of no return: from here on the new layout is the job's.
  if (status.ok()) status = files_.WriteDescription(layout, description);
  if (!status.ok()) {
    arrays_.Restore(arrays_before, layout);
    const absl::Status restored = files_.Restore(files_before, layout);
    if (restored.ok()) return status;
    return absl::Status(status.code(),
                        absl::StrCat(status.message(),
                                     "; what it took before that stays taken: ",
                                     restored.message()));
  }
  arrays_.RemoveUnwanted(layout, arrays);
  files_.RemoveUnwanted(layout, arrays.accumulation);
  return absl::OkStatus();
}

std::unique_ptr<HostStore> HostTier::MakeStore(
    const Layout* layout, uint64_t sub_group_elements) const {
  return std::make_unique<HostStore>(layout, sub_group_elements, Memory());
}

std::vector<HostTier::ArrayInfo> HostTier::Describe(
    const Layout& layout) const {
  std::vector<ArrayInfo> infos;
  for (int i = 0; i < kStateArrayCount; ++i) {
    const auto array = static_cast<StateArrayIndex>(i);
    std::optional<ArrayInfo> info = files_.Describe(array, layout);
    if (!info.has_value()) info = arrays_.Describe(array, layout);
    if (info.has_value()) infos.push_back(*std::move(info));
  }
  files_.DescribeStepFiles(&infos);
  return infos;
}

}  // namespace optstate::storage
