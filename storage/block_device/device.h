#ifndef OPTSTATE_STORAGE_BLOCK_DEVICE_DEVICE_H_
#define OPTSTATE_STORAGE_BLOCK_DEVICE_DEVICE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/types/unique_fd.h"
#include "storage/block_device/superblock.h"

namespace optstate::storage {

// The role in which a process opens a device. One process at a time owns it,
// and keeps file systems, RAID and the like from it (O_EXCL of block devices)
// as long as it has the descriptor; any number may use it.
enum class DeviceUse { kOwn, kUse };

// A block device for records, or a file that stands for one.
struct Device {
  UniqueFd fd;
  std::string path;
  uint64_t bytes = 0;  // whole sectors
};

// Opens a device, whatever is on it. FAILED_PRECONDITION, with the reason: it
// is not there, not a block device, read-only, has too large logical blocks, or
// is in use.
absl::StatusOr<Device> OpenDevice(const std::string& path, DeviceUse use);

// Reads the superblock; errors as DecodeSuperblock(), naming the device.
absl::StatusOr<Superblock> ReadSuperblock(const Device& device);

// A directory's note of its device, DIR/device.
struct DeviceNote {
  std::string device_id;
  std::string directory_id;
};
// Nullopt: the directory has none. DATA_LOSS: it is not what was written.
absl::StatusOr<std::optional<DeviceNote>> ReadDeviceNote(
    const std::string& directory);
absl::Status WriteDeviceNote(const std::string& directory,
                             const DeviceNote& note);

// A device that its directory owns.
struct OwnedDevice {
  Device device;
  Superblock superblock;
};
// Opens the device of a directory and checks that they belong together.
// FAILED_PRECONDITION as in OpenDevice(), and: it was never formatted, or for
// another directory, or is another device than the directory's. DATA_LOSS: it
// has shrunk, or its superblock is damaged.
absl::StatusOr<OwnedDevice> OpenDeviceOf(const std::string& directory,
                                         const std::string& path,
                                         DeviceUse use);

// Returns the commands that format a device for a directory.
std::string HowToFormat(absl::string_view directory, absl::string_view path);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_BLOCK_DEVICE_DEVICE_H_
