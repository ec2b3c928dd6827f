#ifndef OPTSTATE_STORAGE_BLOCK_DEVICE_SUPERBLOCK_H_
#define OPTSTATE_STORAGE_BLOCK_DEVICE_SUPERBLOCK_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::storage {

// The first bytes of a device belong to the superblock, records lie behind.
inline constexpr uint64_t kDeviceHeadBytes = uint64_t{1} << 20;
// The superblock itself, at the device's begin.
inline constexpr uint64_t kSuperblockBytes = 4096;

// The description that a device for records has of itself. Bytes: FORMAT.md.
struct Superblock {
  std::string device_id;     // 32 hexadecimal digits, drawn at random
  std::string directory_id;  // that of the directory that owns the device
  uint64_t device_bytes = 0;
  uint64_t formatted_at_ns = 0;  // since the Unix epoch

  bool operator==(const Superblock&) const = default;
};

// Returns whether the text may be an id.
bool IsDeviceId(absl::string_view text);
// Draws an id.
std::string NewDeviceId();

// Returns kSuperblockBytes.
std::string EncodeSuperblock(const Superblock& superblock);

// Parses what EncodeSuperblock() made. NOT_FOUND: there is none;
// FAILED_PRECONDITION: it is of another version or byte order; DATA_LOSS: it is
// damaged.
absl::StatusOr<Superblock> DecodeSuperblock(absl::string_view bytes);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_BLOCK_DEVICE_SUPERBLOCK_H_
