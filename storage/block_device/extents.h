#ifndef OPTSTATE_STORAGE_BLOCK_DEVICE_EXTENTS_H_
#define OPTSTATE_STORAGE_BLOCK_DEVICE_EXTENTS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"
#include "storage/block_device/superblock.h"
#include "storage/io/io_engine.h"

namespace optstate::storage {

// The extents of a directory's device. Each job has one, or two while its
// records are written anew, which files of its folder name (ReadDiskExtent);
// there is no other table, so an extent is free
// as soon as its folder is removed. Extents begin at multiples of this.
inline constexpr uint64_t kExtentAlignBytes = uint64_t{1} << 20;

// Returns whether any folder of the directory names an extent.
absl::StatusOr<bool> HasExtents(const std::string& directory);

// Returns the bytes of the device that no folder has. DATA_LOSS: a folder's
// extent cannot be read, or does not lie on the device.
absl::StatusOr<uint64_t> FreeBytes(const std::string& directory,
                                   const Superblock& device);

// Gives a job's folder, which exists, the first free extent of this size,
// durably, in place of the one that it has of this arrangement. Engines of one
// directory wait for each other. RESOURCE_EXHAUSTED: no free part is so large,
// with the bytes needed and left; DATA_LOSS: a folder's extent cannot be read,
// or does not lie on the device, so the free parts are not known.
absl::StatusOr<io::Extent> AllocateExtent(const std::string& directory,
                                          const std::string& folder,
                                          const Superblock& device,
                                          uint64_t bytes,
                                          uint32_t arrangement = 0);

// A part of a device that no folder has. While this object lives, no job
// is given an extent of the device, so the object's owner may write to the
// part. Nothing of the part remains taken afterwards, also when the process is
// killed.
struct BorrowedPart {
  UniqueFd lock;
  io::Extent extent;
};

// Borrows the first `bytes` of the largest free part, or all of that part when
// it is smaller. Waits for engines that allocate or borrow.
// RESOURCE_EXHAUSTED: it has less than `bytes_min`. DATA_LOSS: as in
// AllocateExtent().
absl::StatusOr<BorrowedPart> BorrowFreePart(const std::string& directory,
                                            const Superblock& device,
                                            uint64_t bytes_min, uint64_t bytes);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_BLOCK_DEVICE_EXTENTS_H_
