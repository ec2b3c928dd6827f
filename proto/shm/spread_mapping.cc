#include "proto/shm/spread_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace optstate::shm {
namespace {

constexpr uint64_t kSlotBytes = kSpreadBytesMin;
constexpr uint64_t kSlots = 128;
constexpr uint64_t kPeriodBytes = kSlots * kSlotBytes;
// The distance from one slot to the next. A rank's share of the gradients
// begins in the middle of the arrays that are walked with it, often a few slots
// on, and must meet none of their slots.
constexpr size_t kStride = 45;

// The number of mappings that begin in each slot of a period. There is no lock:
// a child that was forked while another thread held it would wait for ever. Two
// threads may find the same slot at the same time; that only costs speed.
std::array<std::atomic<uint32_t>, kSlots> begins;

std::atomic<uint32_t>& BeginsBeside(const void* data) {
  return begins[reinterpret_cast<uintptr_t>(data) / kSlotBytes % kSlots];
}

size_t FreestSlot() {
  size_t freest = 0;
  for (size_t k = 1; k < kSlots; ++k) {
    const size_t slot = k * kStride % kSlots;
    if (begins[slot] < begins[freest]) freest = slot;
  }
  return freest;
}

uint64_t RoundUpToPage(uint64_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// Maps at the begin of a slot, within addresses that are reserved first so that
// no other mapping is there.
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
    munmap(first, all);
    return MAP_FAILED;
  }
  if (before > 0) munmap(first, before);
  munmap(first + before + length, all - before - length);
  return data;
}

}  // namespace

void* MapSpread(int fd, uint64_t bytes, int prot) {
  if (bytes < kSpreadBytesMin) {
    return mmap(nullptr, bytes, prot, MAP_SHARED, fd, 0);
  }
  void* data = MapInSlot(fd, bytes, prot, FreestSlot());
  // Perhaps only addresses are scarce (ulimit -v), or every mapping is locked
  // into memory (mlockall); otherwise this call reports the error.
  if (data == MAP_FAILED) {
    data = mmap(nullptr, bytes, prot, MAP_SHARED, fd, 0);
  }
  if (data != MAP_FAILED) ++BeginsBeside(data);
  return data;
}

void UnmapSpread(void* data, uint64_t bytes) {
  munmap(data, bytes);
  if (bytes >= kSpreadBytesMin) --BeginsBeside(data);
}

}  // namespace optstate::shm
