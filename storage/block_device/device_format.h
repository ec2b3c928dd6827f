#ifndef OPTSTATE_STORAGE_BLOCK_DEVICE_DEVICE_FORMAT_H_
#define OPTSTATE_STORAGE_BLOCK_DEVICE_DEVICE_FORMAT_H_

#include <string>

#include "absl/status/statusor.h"
#include "storage/block_device/superblock.h"

namespace optstate::storage {

// Gives all of a device to the jobs of a directory, which exists and which no
// daemon uses: writes the superblock and the directory's note. A device that
// the directory has already is left as it is, unless `force`. A power cut
// leaves the device without a superblock, or all done.
//
// FAILED_PRECONDITION, with nothing changed: OpenDevice() refuses it; it is too
// small; its first or last MiB is not empty, unless `force`; it belongs to
// another directory; or the directory has jobs with records on a device.
absl::StatusOr<Superblock> FormatDevice(const std::string& directory,
                                        const std::string& path, bool force);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_BLOCK_DEVICE_DEVICE_FORMAT_H_
