#include "client/channel/grpc/anonymous_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::client {

AnonymousMemory::~AnonymousMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

absl::Status AnonymousMemory::Allocate(uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return OsError(errno, absl::StrCat("mmap of ", bytes, " bytes"));
  }
  madvise(data, bytes, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(data);
  size_ = bytes;
  return absl::OkStatus();
}

void AnonymousMemory::Release(uint64_t begin, uint64_t end) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = (begin + page - 1) / page * page;
  const uint64_t last = end / page * page;
  if (first < last) madvise(data_ + first, last - first, MADV_DONTNEED);
}

}  // namespace optstate::client
