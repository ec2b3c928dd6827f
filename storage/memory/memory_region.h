#ifndef OPTSTATE_STORAGE_MEMORY_MEMORY_REGION_H_
#define OPTSTATE_STORAGE_MEMORY_MEMORY_REGION_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/memory/memory_locker.h"

namespace optstate::storage {

// A mapped range of memory that carries its own release: unmapped when
// destroyed. Made only by the factories below.
//
// Move-only; not thread-safe. data() is null exactly when size() is 0.
class MemoryRegion {
 public:
  // Maps [0, bytes) of the file, shared and writable, and asks for huge pages
  // (where the file system has none this changes nothing). The caller has
  // reserved the file's blocks; touching a hole of a full tmpfs is a SIGBUS.
  // Does not keep `fd`. `bytes` > 0.
  static absl::StatusOr<MemoryRegion> MapShared(int fd, uint64_t bytes);

  MemoryRegion() = default;
  MemoryRegion(MemoryRegion&& other) noexcept { Swap(other); }
  MemoryRegion& operator=(MemoryRegion&& other) noexcept {
    MemoryRegion taken(std::move(other));
    Swap(taken);
    return *this;
  }
  ~MemoryRegion();

  // Has the locker lock [begin, end) of it until it is unmapped. The locker
  // outlives this.
  void Lock(uint64_t begin, uint64_t end, MemoryLocker* locker);
  // Says whether a part of it was given to a locker.
  bool is_locked() const { return !locks_.empty(); }

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  MemoryRegion(std::byte* data, uint64_t size) : data_(data), size_(size) {}
  void Swap(MemoryRegion& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(locks_, other.locks_);
  }

  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  std::vector<LockedRange> locks_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_MEMORY_MEMORY_REGION_H_
