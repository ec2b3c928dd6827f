#include "storage/block_device/device_format.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/types/status_macros.h"
#include "storage/block_device/device.h"
#include "storage/block_device/extents.h"
#include "storage/io/file_error.h"

namespace optstate::storage {
namespace {

// The superblock, and room for one record at least.
constexpr uint64_t kDeviceBytesMin = 2 * kDeviceHeadBytes;

absl::Status Read(const Device& device, uint64_t offset, std::string* bytes) {
  const ssize_t read = ::pread(device.fd.get(), bytes->data(), bytes->size(),
                               static_cast<off_t>(offset));
  if (read == static_cast<ssize_t>(bytes->size())) return absl::OkStatus();
  return io::FileError(read < 0 ? errno : EIO,
                       absl::StrCat("read of ", bytes->size(), " bytes at ",
                                    offset, " of ", device.path),
                       device.path);
}

// File systems, partition tables, LVM and RAID have something in one of these.
absl::Status CheckBlank(const Device& device) {
  std::string head(kDeviceHeadBytes, '\0');
  std::string tail(kDeviceHeadBytes, '\0');
  OPTSTATE_RETURN_IF_ERROR(Read(device, 0, &head));
  OPTSTATE_RETURN_IF_ERROR(Read(device, device.bytes - tail.size(), &tail));
  for (const auto* bytes : {&head, &tail}) {
    if (bytes->find_first_not_of('\0') == std::string::npos) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        device.path, " is not empty: its ", bytes == &head ? "first" : "last",
        " MiB has data, as of a file system or a partition table. If nothing "
        "on it is needed any more, add --force, which overwrites it"));
  }
  return absl::OkStatus();
}

// Gives a file that stands for a device all of its blocks, so that no write to
// it runs out of space.
absl::Status ReserveFile(const Device& device) {
  struct stat info;
  if (::fstat(device.fd.get(), &info) != 0) {
    return io::FileError(errno, absl::StrCat("fstat of ", device.path),
                         device.path);
  }
  if (!S_ISREG(info.st_mode)) return absl::OkStatus();
  if (::fallocate(device.fd.get(), 0, 0, info.st_size) == 0) {
    return absl::OkStatus();
  }
  return io::FileError(errno, absl::StrCat("fallocate of ", device.path),
                       device.path, static_cast<uint64_t>(info.st_size));
}

absl::Status WriteHead(const Device& device, const Superblock& superblock) {
  std::string head = EncodeSuperblock(superblock);
  head.resize(kDeviceHeadBytes, '\0');
  const ssize_t written =
      ::pwrite(device.fd.get(), head.data(), head.size(), 0);
  if (written != static_cast<ssize_t>(head.size())) {
    return io::FileError(
        written < 0 ? errno : EIO,
        absl::StrCat("write of ", head.size(), " bytes at 0 of ", device.path),
        device.path, head.size());
  }
  if (::fsync(device.fd.get()) == 0) return absl::OkStatus();
  return io::FileError(errno, absl::StrCat("fsync of ", device.path),
                       device.path);
}

// Returns the superblock when the directory has the device already. Nullopt:
// it may be formatted.
absl::StatusOr<std::optional<Superblock>> CheckOwner(
    const std::string& directory, const Device& device,
    const std::optional<DeviceNote>& note) {
  const absl::StatusOr<Superblock> now = ReadSuperblock(device);
  if (!now.ok()) return std::nullopt;  // CheckBlank() looks at it
  if (!note.has_value() || note->directory_id != now->directory_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        device.path, " belongs to another directory than ", directory,
        ", the one whose file `device` names directory ", now->directory_id,
        ". To give up what is on it, overwrite its first MiB: dd if=/dev/zero "
        "of=",
        device.path, " bs=1M count=1"));
  }
  if (note->device_id != now->device_id) return std::nullopt;
  return *now;
}

}  // namespace

absl::StatusOr<Superblock> FormatDevice(const std::string& directory,
                                        const std::string& path, bool force) {
  OPTSTATE_ASSIGN_OR_RETURN(const Device device,
                            OpenDevice(path, DeviceUse::kOwn));
  if (device.bytes < kDeviceBytesMin) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has ", device.bytes, " bytes, a device needs ",
                     kDeviceBytesMin, " at least"));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<DeviceNote> note,
                            ReadDeviceNote(directory));
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<Superblock> owned,
                            CheckOwner(directory, device, note));
  if (owned.has_value() && !force) return *owned;
  OPTSTATE_ASSIGN_OR_RETURN(const bool has_extents, HasExtents(directory));
  if (has_extents) {
    return absl::FailedPreconditionError(absl::StrCat(
        directory, " has jobs with records on a device: delete them first"));
  }
  if (!force) OPTSTATE_RETURN_IF_ERROR(CheckBlank(device));
  OPTSTATE_RETURN_IF_ERROR(ReserveFile(device));
  const Superblock superblock = {
      .device_id = NewDeviceId(),
      .directory_id = note.has_value() ? note->directory_id : NewDeviceId(),
      .device_bytes = device.bytes,
      .formatted_at_ns = static_cast<uint64_t>(absl::ToUnixNanos(absl::Now()))};
  // A note of a device that has no such superblock is refused, so the device
  // comes last.
  OPTSTATE_RETURN_IF_ERROR(
      WriteDeviceNote(directory, {.device_id = superblock.device_id,
                                  .directory_id = superblock.directory_id}));
  OPTSTATE_RETURN_IF_ERROR(WriteHead(device, superblock));
  OPTSTATE_ASSIGN_OR_RETURN(const Superblock read, ReadSuperblock(device));
  if (read == superblock) return superblock;
  return absl::DataLossError(
      absl::StrCat(path, ": the superblock is not read as it was written"));
}

}  // namespace optstate::storage
