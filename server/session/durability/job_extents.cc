#include "server/session/durability/job_extents.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/config/nvme_directory.h"
#include "storage/block_device/device.h"
#include "storage/block_device/extents.h"
#include "storage/disk_folder.h"

namespace optstate::session {
namespace {

// A directory of the configuration, and the job's folder in it.
struct Place {
  std::string directory;
  std::string folder;
  std::string device;  // empty: the directory has none
};

// A new job's folder may have an extent of the job that it takes over from.
absl::StatusOr<storage::DeviceExtent> MakeExtent(const Place& place,
                                                 uint32_t arrangement,
                                                 uint64_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(
      storage::RemoveDiskExtent(place.folder, arrangement));
  if (place.device.empty()) return storage::DeviceExtent();
  OPTSTATE_ASSIGN_OR_RETURN(const storage::OwnedDevice owned,
                            storage::OpenDeviceOf(place.directory, place.device,
                                                  storage::DeviceUse::kUse));
  OPTSTATE_ASSIGN_OR_RETURN(
      const io::Extent extent,
      storage::AllocateExtent(place.directory, place.folder, owned.superblock,
                              bytes, arrangement));
  return storage::DeviceExtent{place.device, extent};
}

absl::StatusOr<storage::DeviceExtent> FindExtent(const Place& place,
                                                 uint32_t arrangement) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<storage::DiskExtent> found,
                            storage::ReadDiskExtent(place.folder, arrangement));
  if (!found.has_value()) return storage::DeviceExtent();
  if (place.device.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(place.folder, ": the job's records are on device ",
                     found->device_id, ", and ", place.directory,
                     " has no device: start optstated with --nvme-dir ",
                     place.directory, ",device=DEVICE"));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const storage::OwnedDevice owned,
                            storage::OpenDeviceOf(place.directory, place.device,
                                                  storage::DeviceUse::kUse));
  const storage::Superblock& superblock = owned.superblock;
  if (superblock.device_id != found->device_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        place.folder, ": the job's records are on device ", found->device_id,
        ", and ", place.device, " is device ", superblock.device_id));
  }
  if (found->extent.begin_bytes < storage::kDeviceHeadBytes ||
      found->extent.end_bytes() > superblock.device_bytes) {
    return absl::DataLossError(absl::StrCat(
        storage::DiskExtentPath(place.folder, arrangement), " names bytes ",
        found->extent.begin_bytes, " to ", found->extent.end_bytes(), " of ",
        place.device, ", which has ", superblock.device_bytes));
  }
  return storage::DeviceExtent{place.device, found->extent};
}

}  // namespace

absl::StatusOr<std::vector<storage::DeviceExtent>> TakeExtents(
    const v1::NvmeSettings& nvme, const std::string& job,
    absl::Span<const uint64_t> bytes, uint32_t arrangement, bool is_new) {
  std::vector<storage::DeviceExtent> extents;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const std::string& directory = nvme.directories(static_cast<int>(i));
    const Place place = {directory, storage::DiskFolder(directory, job),
                         config::DeviceOf(nvme, directory)};
    OPTSTATE_ASSIGN_OR_RETURN(storage::DeviceExtent extent,
                              is_new ? MakeExtent(place, arrangement, bytes[i])
                                     : FindExtent(place, arrangement));
    extents.push_back(std::move(extent));
  }
  return extents;
}

}  // namespace optstate::session
