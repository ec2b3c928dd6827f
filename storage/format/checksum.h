#ifndef OPTSTATE_STORAGE_FORMAT_CHECKSUM_H_
#define OPTSTATE_STORAGE_FORMAT_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace optstate::storage {

// Computes CRC-32C (Castagnoli) as iSCSI, ext4 and leveldb do: initial value
// and final inversion included, so that Crc32c of "123456789" is 0xe3069283.
uint32_t Crc32c(const void* data, size_t bytes);

// Returns the checksum of bytes that follow others, whose checksum is `before`
// (0: none come before).
uint32_t ExtendCrc32c(uint32_t before, const void* data, size_t bytes);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_FORMAT_CHECKSUM_H_
