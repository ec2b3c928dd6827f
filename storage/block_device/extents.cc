#include "storage/block_device/extents.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "storage/disk_folder.h"
#include "storage/io/file_error.h"

namespace optstate::storage {
namespace {

constexpr char kLockFile[] = "/extents.lock";

uint64_t RoundUp(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Returns the extents of all folders, also of those that are being removed, but
// for that of the file `except`.
absl::StatusOr<std::vector<DiskExtent>> ReadExtents(
    const std::string& directory, const std::string& except) {
  std::vector<DiskExtent> extents;
  std::error_code error;
  for (std::filesystem::directory_iterator
           entry(directory + kDiskJobsFolder, error),
       end;
       !error && entry != end; entry.increment(error)) {
    const std::string folder = entry->path().string();
    for (const uint32_t arrangement : {0, 1}) {
      if (DiskExtentPath(folder, arrangement) == except) continue;
      OPTSTATE_ASSIGN_OR_RETURN(const std::optional<DiskExtent> extent,
                                ReadDiskExtent(folder, arrangement));
      if (extent.has_value()) extents.push_back(*extent);
    }
  }
  if (error && error.value() != ENOENT) {
    const std::string folder = absl::StrCat(directory, kDiskJobsFolder);
    return io::FileError(error.value(), absl::StrCat("read ", folder), folder);
  }
  return extents;
}

// Returns DATA_LOSS for an extent that the device cannot have: what is free is
// not known then.
absl::Status CheckOnDevice(const std::string& directory,
                           const io::Extent& extent, const Superblock& device) {
  if (extent.begin_bytes >= kDeviceHeadBytes &&
      extent.bytes <= device.device_bytes &&
      extent.begin_bytes <= device.device_bytes - extent.bytes) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat(
      "a folder in ", directory, kDiskJobsFolder, " has the ", extent.bytes,
      " bytes at ", extent.begin_bytes,
      " of the device, whose records lie in [", kDeviceHeadBytes, ", ",
      device.device_bytes,
      "): is its file `extent` damaged, or the device another one?"));
}

// Returns the parts of the device that no file but `except` names, in order.
absl::StatusOr<std::vector<io::Extent>> FreeParts(const std::string& directory,
                                                  const std::string& except,
                                                  const Superblock& device) {
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<DiskExtent> used,
                            ReadExtents(directory, except));
  std::sort(used.begin(), used.end(),
            [](const DiskExtent& a, const DiskExtent& b) {
              return a.extent.begin_bytes < b.extent.begin_bytes;
            });
  std::vector<io::Extent> parts;
  uint64_t begin = kDeviceHeadBytes;
  const auto add_to = [&](uint64_t end) {
    if (end > begin) parts.push_back({begin, end - begin});
  };
  for (const DiskExtent& one : used) {
    if (one.device_id != device.device_id) continue;
    OPTSTATE_RETURN_IF_ERROR(CheckOnDevice(directory, one.extent, device));
    add_to(one.extent.begin_bytes);
    begin = std::max(begin, RoundUp(one.extent.end_bytes(), kExtentAlignBytes));
  }
  add_to(device.device_bytes);
  return parts;
}

uint64_t SumOf(const std::vector<io::Extent>& parts) {
  uint64_t bytes = 0;
  for (const io::Extent& part : parts) bytes += part.bytes;
  return bytes;
}

absl::StatusOr<UniqueFd> Lock(const std::string& directory) {
  const std::string path = directory + kLockFile;
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd.ok()) return io::FileError(errno, absl::StrCat("open ", path), path);
  int failed;
  do {
    failed = ::flock(fd.get(), LOCK_EX);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) {
    return io::FileError(errno, absl::StrCat("flock ", path), path);
  }
  return fd;
}

}  // namespace

absl::StatusOr<bool> HasExtents(const std::string& directory) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<DiskExtent> extents,
                            ReadExtents(directory, ""));
  return !extents.empty();
}

absl::StatusOr<uint64_t> FreeBytes(const std::string& directory,
                                   const Superblock& device) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<io::Extent> parts,
                            FreeParts(directory, "", device));
  return SumOf(parts);
}

absl::StatusOr<io::Extent> AllocateExtent(const std::string& directory,
                                          const std::string& folder,
                                          const Superblock& device,
                                          uint64_t bytes,
                                          uint32_t arrangement) {
  OPTSTATE_ASSIGN_OR_RETURN(const UniqueFd lock, Lock(directory));
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::vector<io::Extent> parts,
      FreeParts(directory, DiskExtentPath(folder, arrangement), device));
  uint64_t largest = 0;
  for (const io::Extent& part : parts) {
    largest = std::max(largest, part.bytes);
    if (part.bytes < bytes) continue;
    const io::Extent extent = {part.begin_bytes, bytes};
    OPTSTATE_RETURN_IF_ERROR(
        WriteDiskExtent(folder, {device.device_id, extent}, arrangement));
    return extent;
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "the device of ", directory, ": the job needs ", bytes,
      " bytes of it in one piece, the largest free one has ", largest, " (",
      SumOf(parts), " are free in all): delete a job, or use a larger device"));
}

absl::StatusOr<BorrowedPart> BorrowFreePart(const std::string& directory,
                                            const Superblock& device,
                                            uint64_t bytes_min,
                                            uint64_t bytes) {
  OPTSTATE_ASSIGN_OR_RETURN(UniqueFd lock, Lock(directory));
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<io::Extent> parts,
                            FreeParts(directory, "", device));
  io::Extent largest;
  for (const io::Extent& part : parts) {
    if (part.bytes > largest.bytes) largest = part;
  }
  if (largest.bytes < bytes_min) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the device of ", directory, " has no free part of ",
                     bytes_min, " bytes: the largest one has ", largest.bytes));
  }
  largest.bytes = std::min(largest.bytes, bytes);
  return BorrowedPart{std::move(lock), largest};
}

}  // namespace optstate::storage
