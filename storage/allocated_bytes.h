#ifndef OPTSTATE_STORAGE_ALLOCATED_BYTES_H_
#define OPTSTATE_STORAGE_ALLOCATED_BYTES_H_

#include <cstdint>
#include <string>

namespace optstate::storage {

// Returns the bytes that the files below a directory take, as far as they can
// be read.
uint64_t AllocatedBytesBelow(const std::string& directory);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_ALLOCATED_BYTES_H_
