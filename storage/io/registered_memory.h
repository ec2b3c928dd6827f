#ifndef OPTSTATE_STORAGE_IO_REGISTERED_MEMORY_H_
#define OPTSTATE_STORAGE_IO_REGISTERED_MEMORY_H_

#include <liburing.h>

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace optstate::io {

// Memory that a ring keeps pinned, in pieces. Not thread-safe.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(uint64_t piece_bytes) : piece_bytes_(piece_bytes) {}

  // Registers `memory` with the ring, in place of what was. Returns 0 or errno;
  // after an error, nothing is registered.
  int Register(io_uring* ring, absl::Span<std::byte> memory);

  struct Part {
    int piece = -1;      // -1: not in registered memory
    uint64_t bytes = 0;  // that lie in this piece, or in none
  };
  // Returns where the beginning of [data, data + bytes) lies.
  Part Find(const std::byte* data, uint64_t bytes) const;

 private:
  const uint64_t piece_bytes_;
  absl::Span<std::byte> memory_;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_REGISTERED_MEMORY_H_
