#include "storage/block_device/device.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/types/status_macros.h"
#include "storage/disk_folder.h"
#include "storage/io/disk_bytes.h"
#include "storage/io/file_error.h"
#include "storage/io/io_engine.h"

namespace optstate::storage {
namespace {

constexpr char kDeviceFile[] = "/device";

absl::Status Refused(const std::string& path, absl::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat(path, " ", why));
}

absl::Status InUse(const std::string& path) {
  return Refused(path,
                 "is in use: it is mounted, a part of a RAID, LVM or encrypted "
                 "volume, or another process has it as its own");
}

absl::Status OpenError(const std::string& path, int error) {
  switch (error) {
    case ENOENT:
    case ENXIO:
    case ENODEV:
      return Refused(path,
                     "is not there: is the drive plugged in, and does "
                     "it have this name?");
    case EBUSY:
      return InUse(path);
    case EROFS:
      return Refused(path, "is read-only");
    case EISDIR:
      return Refused(path, "is not a block device");
    default:
      return absl::FailedPreconditionError(
          io::FileError(error, absl::StrCat("open ", path), path).message());
  }
}

absl::Status CheckBlocks(const Device& device) {
  int block_bytes = 0;
  int read_only = 0;
  if (::ioctl(device.fd.get(), BLKSSZGET, &block_bytes) != 0 ||
      ::ioctl(device.fd.get(), BLKROGET, &read_only) != 0) {
    return io::FileError(errno, absl::StrCat("ioctl of ", device.path),
                         device.path);
  }
  if (read_only != 0) return Refused(device.path, "is read-only");
  if (static_cast<uint64_t>(block_bytes) <= io::kSectorBytes) {
    return absl::OkStatus();
  }
  return Refused(device.path,
                 absl::StrCat("has logical blocks of ", block_bytes,
                              " bytes, more than ", io::kSectorBytes));
}

// Keeps other owners from the device. A block device is already this one's.
absl::Status LockHead(const Device& device) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = static_cast<off_t>(kSuperblockBytes);
  if (::fcntl(device.fd.get(), F_OFD_SETLK, &lock) == 0) {
    return absl::OkStatus();
  }
  return InUse(device.path);
}

}  // namespace

absl::StatusOr<Device> OpenDevice(const std::string& path, DeviceUse use) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return OpenError(path, errno);
  const bool is_block = S_ISBLK(info.st_mode);
  // O_EXCL is for block devices alone.
  const int exclusive = is_block && use == DeviceUse::kOwn ? O_EXCL : 0;
  Device device;
  device.path = path;
  device.fd = UniqueFd(::open(path.c_str(), O_RDWR | O_CLOEXEC | exclusive));
  if (!device.fd.ok()) return OpenError(path, errno);
  OPTSTATE_ASSIGN_OR_RETURN(device.bytes, io::DiskBytes(device.fd.get(), path));
  device.bytes -= device.bytes % io::kSectorBytes;
  if (is_block) OPTSTATE_RETURN_IF_ERROR(CheckBlocks(device));
  if (use == DeviceUse::kOwn) OPTSTATE_RETURN_IF_ERROR(LockHead(device));
  return device;
}

absl::StatusOr<Superblock> ReadSuperblock(const Device& device) {
  std::string bytes(kSuperblockBytes, '\0');
  const ssize_t read = ::pread(device.fd.get(), bytes.data(), bytes.size(), 0);
  if (read < 0) {
    return absl::DataLossError(
        io::FileError(errno,
                      absl::StrCat("read of ", bytes.size(), " bytes at 0 of ",
                                   device.path),
                      device.path)
            .message());
  }
  absl::StatusOr<Superblock> superblock = DecodeSuperblock(bytes);
  if (superblock.ok()) return superblock;
  return Annotate(superblock.status(), device.path);
}

absl::StatusOr<std::optional<DeviceNote>> ReadDeviceNote(
    const std::string& directory) {
  const std::string path = directory + kDeviceFile;
  const absl::StatusOr<std::string> text = ReadDiskText(path);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  OPTSTATE_RETURN_IF_ERROR(text.status());
  const std::vector<std::string> words =
      absl::StrSplit(*text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  if (words.size() != 4 || words[0] != "device" || !IsDeviceId(words[1]) ||
      words[2] != "directory" || !IsDeviceId(words[3])) {
    return absl::DataLossError(
        absl::StrCat(path, " holds no \"device X directory Y\""));
  }
  return DeviceNote{.device_id = words[1], .directory_id = words[3]};
}

absl::Status WriteDeviceNote(const std::string& directory,
                             const DeviceNote& note) {
  return WriteDurably(directory + kDeviceFile,
                      absl::StrCat("device ", note.device_id, "\ndirectory ",
                                   note.directory_id, "\n"));
}

std::string HowToFormat(absl::string_view directory, absl::string_view path) {
  return absl::StrCat("optstated --format-device ", directory,
                      ",device=", path);
}

absl::StatusOr<OwnedDevice> OpenDeviceOf(const std::string& directory,
                                         const std::string& path,
                                         DeviceUse use) {
  OwnedDevice owned;
  OPTSTATE_ASSIGN_OR_RETURN(owned.device, OpenDevice(path, use));
  absl::StatusOr<Superblock> superblock = ReadSuperblock(owned.device);
  if (absl::IsNotFound(superblock.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        superblock.status().message(), ": to give all of it to jobs, run ",
        HowToFormat(directory, path)));
  }
  OPTSTATE_RETURN_IF_ERROR(superblock.status());
  owned.superblock = *std::move(superblock);
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<DeviceNote> note,
                            ReadDeviceNote(directory));
  if (!note.has_value() ||
      note->directory_id != owned.superblock.directory_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " belongs to another directory than ", directory,
        ": it was formatted for the one whose file `device` names directory ",
        owned.superblock.directory_id, ". Nothing was changed on it"));
  }
  if (note->device_id != owned.superblock.device_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " is device ", owned.superblock.device_id, ", ", directory,
        " has its records on device ", note->device_id,
        ": have two drives changed their names? Nothing was changed on it"));
  }
  if (owned.device.bytes < owned.superblock.device_bytes) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", owned.device.bytes, " bytes, it had ",
                     owned.superblock.device_bytes,
                     " when it was formatted: it has shrunk, "
                     "and records may be missing"));
  }
  return owned;
}

}  // namespace optstate::storage
