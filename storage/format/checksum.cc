#include "storage/format/checksum.h"

#include <isa-l.h>

#include <algorithm>

namespace optstate::storage {

uint32_t Crc32c(const void* data, size_t bytes) {
  return ExtendCrc32c(0, data, bytes);
}

uint32_t ExtendCrc32c(uint32_t before, const void* data, size_t bytes) {
  // ISA-L counts in int and takes a non-const pointer that it only reads.
  constexpr size_t kChunkBytes = size_t{1} << 30;
  auto* next = static_cast<unsigned char*>(const_cast<void*>(data));
  unsigned int crc = ~before;
  while (bytes > 0) {
    const size_t chunk = std::min(bytes, kChunkBytes);
    crc = crc32_iscsi(next, static_cast<int>(chunk), crc);
    next += chunk;
    bytes -= chunk;
  }
  return ~crc;
}

}  // namespace optstate::storage
