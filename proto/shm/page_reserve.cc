#include "proto/shm/page_reserve.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <optional>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

// The kernel's ABI, newer than the headers of older systems.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

namespace optstate::shm {
namespace {

// The unit in bytes in which stat counts blocks, whatever the file system.
constexpr uint64_t kStatBlockBytes = 512;

struct CachestatRange {
  uint64_t offset;
  uint64_t bytes;
};
struct CachestatResult {
  uint64_t cached;
  uint64_t dirty;
  uint64_t writeback;
  uint64_t evicted;  // swapped out, as far as tmpfs goes
  uint64_t recently_evicted;
};

absl::Status Holes(uint64_t bytes, uint64_t reserved) {
  return absl::InvalidArgumentError(
      absl::StrCat("expected ", bytes, " bytes without holes, found ",
                   std::min(reserved, bytes), " reserved"));
}

// Returns the first byte of [from, bytes) that has not been written; `bytes`
// when all have been.
uint64_t FirstUnwritten(int fd, uint64_t from, uint64_t bytes) {
  const off_t hole = ::lseek(fd, static_cast<off_t>(from), SEEK_HOLE);
  return hole < 0 ? from : std::min(static_cast<uint64_t>(hole), bytes);
}

bool IsHugetlb(int fd) {
  struct statfs info;
  return ::fstatfs(fd, &info) != 0 || info.f_type == HUGETLBFS_MAGIC;
}

// Returns the bytes of the range's existing pages; nothing: the kernel cannot
// count them.
std::optional<uint64_t> CountReserved(int fd, uint64_t bytes) {
  const CachestatRange range = {0, bytes};
  CachestatResult found = {};
  if (::syscall(SYS_cachestat, fd, &range, &found, 0) != 0) return std::nullopt;
  return (found.cached + found.evicted) *
         static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// Gives the range from `begin` on its missing pages.
absl::Status FillHoles(int fd, uint64_t begin, uint64_t bytes) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t from = begin / page * page;
  void* data = ::mmap(nullptr, bytes - from, PROT_READ, MAP_SHARED, fd,
                      static_cast<off_t>(from));
  if (data == MAP_FAILED) return OsError(errno, "mmap");
  const int result = ::madvise(data, bytes - from, MADV_POPULATE_READ);
  const int error = errno;
  ::munmap(data, bytes - from);
  // EINVAL: the kernel is older than Linux 5.14. The count of blocks was
  // sufficient, at least.
  if (result == 0 || error == EINVAL) return absl::OkStatus();
  return Annotate(Holes(bytes, begin), "no memory for them here");
}

absl::Status CheckBlocks(int fd, uint64_t bytes) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return OsError(errno, "fstat");
  const uint64_t reserved =
      static_cast<uint64_t>(info.st_blocks) * kStatBlockBytes;
  return reserved < bytes ? Holes(bytes, reserved) : absl::OkStatus();
}

}  // namespace

absl::Status CheckReserved(int fd, uint64_t bytes) {
  absl::Status blocks = CheckBlocks(fd, bytes);
  if (!blocks.ok()) return blocks;
  if (IsHugetlb(fd)) return FillHoles(fd, 0, bytes);
  if (FirstUnwritten(fd, 0, bytes) >= bytes) return absl::OkStatus();
  const std::optional<uint64_t> reserved = CountReserved(fd, bytes);
  if (!reserved) return internal::CheckReservedWithoutCounting(fd, bytes);
  return *reserved < bytes ? Holes(bytes, *reserved) : absl::OkStatus();
}

uint64_t EndOfWritten(int fd, uint64_t from, uint64_t bytes) {
  // default_llseek() of hugetlbfs finds no holes wherever they are.
  if (from >= bytes || IsHugetlb(fd)) return from;
  return FirstUnwritten(fd, from, bytes);
}

absl::Status internal::CheckReservedWithoutCounting(int fd, uint64_t bytes) {
  const uint64_t begin = FirstUnwritten(fd, 0, bytes);
  return begin >= bytes ? absl::OkStatus() : FillHoles(fd, begin, bytes);
}

}  // namespace optstate::shm
