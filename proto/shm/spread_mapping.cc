#include "proto/shm/spread_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace optstate::shm {
namespace {

constexpr uint64_t kSlotBytes = kSpreadBytesMin;
constexpr uint64_t kSlots = 128;
constexpr uint64_t kPeriodBytes = kSlots * kSlotBytes;

ABSL_CONST_INIT absl::Mutex mutex(absl::kConstInit);
// Mappings that begin in each slot of a period.
std::array<uint32_t, kSlots> begins ABSL_GUARDED_BY(mutex);

size_t SlotOf(const void* data) {
  return reinterpret_cast<uintptr_t>(data) / kSlotBytes % kSlots;
}

uint64_t RoundUpToPage(uint64_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// At the begin of a slot, within addresses that are taken first so that nobody
// else is there.
void* MapInSlot(int fd, uint64_t bytes, int prot, size_t slot) {
  const uint64_t length = RoundUpToPage(bytes);
  const uint64_t all = length + kPeriodBytes;
  void* const taken = mmap(nullptr, all, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) return MAP_FAILED;
  auto* const first = static_cast<std::byte*>(taken);
  const uint64_t before =
      (slot * kSlotBytes - reinterpret_cast<uintptr_t>(first)) % kPeriodBytes;
  void* const data =
      mmap(first + before, bytes, prot, MAP_SHARED | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    munmap(first, all);
    errno = error;
    return MAP_FAILED;
  }
  if (before > 0) munmap(first, before);
  if (before + length < all) {
    munmap(first + before + length, all - before - length);
  }
  return data;
}

}  // namespace

void* MapSpread(int fd, uint64_t bytes, int prot) {
  if (bytes < kSpreadBytesMin) {
    return mmap(nullptr, bytes, prot, MAP_SHARED, fd, 0);
  }
  absl::MutexLock lock(&mutex);
  const auto* const freest = std::min_element(begins.begin(), begins.end());
  void* data = MapInSlot(fd, bytes, prot, freest - begins.begin());
  // Perhaps only the addresses are scarce (ulimit -v).
  if (data == MAP_FAILED && errno == ENOMEM) {
    data = mmap(nullptr, bytes, prot, MAP_SHARED, fd, 0);
  }
  if (data != MAP_FAILED) ++begins[SlotOf(data)];
  return data;
}

void UnmapSpread(void* data, uint64_t bytes) {
  munmap(data, bytes);
  if (bytes < kSpreadBytesMin) return;
  absl::MutexLock lock(&mutex);
  --begins[SlotOf(data)];
}

}  // namespace optstate::shm
