#include "storage/memory/memory_region.h"

#include <sys/mman.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/shm/spread_mapping.h"
#include "proto/types/os_error.h"

namespace optstate::storage {

absl::StatusOr<MemoryRegion> MemoryRegion::MapShared(int fd, uint64_t bytes) {
  void* data = shm::MapSpread(fd, bytes, PROT_READ | PROT_WRITE);
  if (data == MAP_FAILED) {
    return OsError(errno, absl::StrCat("mmap of ", bytes, " bytes"));
  }
  // Huge pages are a wish, not a need: refused on kernels and file systems
  // without them.
  ::madvise(data, bytes, MADV_HUGEPAGE);
  // The state belongs to one process and is as large as the memory: a core file
  // or a child has no use for it.
  ::madvise(data, bytes, MADV_DONTDUMP);
  ::madvise(data, bytes, MADV_DONTFORK);
  return MemoryRegion(static_cast<std::byte*>(data), bytes);
}

void MemoryRegion::Lock(uint64_t begin, uint64_t end, MemoryLocker* locker) {
  locks_.push_back(locker->Lock({data_ + begin, end - begin}));
}

MemoryRegion::~MemoryRegion() {
  // Another mapping may come to lie here.
  locks_.clear();
  if (data_ != nullptr) shm::UnmapSpread(data_, size_);
}

}  // namespace optstate::storage
