#ifndef OPTSTATE_STORAGE_FORMAT_SEALED_HEADER_H_
#define OPTSTATE_STORAGE_FORMAT_SEALED_HEADER_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "storage/format/checksum.h"

namespace optstate::storage {

// A header of a file, as it lies there: plain data whose last field,
// `header_crc32c`, is the CRC-32C of all bytes before it.

template <typename Header>
uint32_t HeaderChecksum(const Header& header) {
  static_assert(std::is_trivially_copyable_v<Header>);
  static_assert(
      offsetof(Header, header_crc32c) + sizeof(uint32_t) == sizeof(Header),
      "the checksum is the last field");
  return Crc32c(&header, offsetof(Header, header_crc32c));
}

// Sets the checksum of a header that is otherwise complete.
template <typename Header>
void Seal(Header* header) {
  header->header_crc32c = HeaderChecksum(*header);
}

// Says whether a header that was read is as it was sealed.
template <typename Header>
bool IsSealed(const Header& header) {
  return header.header_crc32c == HeaderChecksum(header);
}

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_FORMAT_SEALED_HEADER_H_
