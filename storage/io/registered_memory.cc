#include "storage/io/registered_memory.h"

#include <sys/uio.h>

#include <algorithm>
#include <vector>

namespace optstate::io {

int RegisteredMemory::Register(io_uring* ring, absl::Span<std::byte> memory) {
  if (!memory_.empty()) {
    io_uring_unregister_buffers(ring);
    memory_ = {};
  }
  std::vector<iovec> pieces;
  for (uint64_t begin = 0; begin < memory.size(); begin += piece_bytes_) {
    const auto piece = memory.subspan(begin, piece_bytes_);
    pieces.push_back({.iov_base = piece.data(), .iov_len = piece.size()});
  }
  if (pieces.empty()) return 0;
  const int result = io_uring_register_buffers(
      ring, pieces.data(), static_cast<unsigned>(pieces.size()));
  if (result < 0) return -result;
  memory_ = memory;
  return 0;
}

RegisteredMemory::Part RegisteredMemory::Find(const std::byte* data,
                                              uint64_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto begin = reinterpret_cast<uintptr_t>(memory_.data());
  if (address < begin || address >= begin + memory_.size() ||
      bytes > begin + memory_.size() - address) {
    return {.piece = -1, .bytes = bytes};
  }
  const uint64_t offset = address - begin;
  return {.piece = static_cast<int>(offset / piece_bytes_),
          .bytes = std::min(bytes, piece_bytes_ - offset % piece_bytes_)};
}

}  // namespace optstate::io
