#ifndef OPTSTATE_STORAGE_IO_DISK_BYTES_H_
#define OPTSTATE_STORAGE_IO_DISK_BYTES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace optstate::io {

// Returns the size of an open block device, or of a file that stands for one.
// FAILED_PRECONDITION: it is neither.
absl::StatusOr<uint64_t> DiskBytes(int fd, const std::string& path);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_DISK_BYTES_H_
