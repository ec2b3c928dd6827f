#include "storage/accelerator/emulated_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::accelerator {
namespace {

constexpr uint64_t kPageBytes = 4096;

// Returns null when the system has no room.
void* Map(uint64_t bytes, int protection) {
  void* const pages =
      mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

}  // namespace

EmulatedMemory::~EmulatedMemory() {
  const absl::MutexLock lock(&mu_);
  for (const auto& [address, allocation] : allocations_) {
    munmap(reinterpret_cast<void*>(address), allocation.mapped_bytes);
    munmap(allocation.data, allocation.mapped_bytes);
  }
}

absl::StatusOr<DeviceAddress> EmulatedMemory::Allocate(uint64_t bytes) {
  const absl::MutexLock lock(&mu_);
  if (bytes == 0) return absl::InvalidArgumentError("no bytes are allocated");
  if (bytes > bytes_ - used_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the device has ", bytes_ - used_bytes_, " of ", bytes_,
                     " bytes left, ", bytes, " are needed"));
  }
  Allocation allocation;
  allocation.bytes = bytes;
  allocation.mapped_bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  void* const address = Map(allocation.mapped_bytes, PROT_NONE);
  if (address == nullptr) return OsError(errno, "mmap of device addresses");
  void* const data = Map(allocation.mapped_bytes, PROT_READ | PROT_WRITE);
  if (data == nullptr) {
    const int error = errno;
    munmap(address, allocation.mapped_bytes);
    return OsError(error, "mmap of an emulated device's memory");
  }
  // Fresh memory of a device has any content; zeros would hide a missing copy.
  std::memset(data, 0xA5, allocation.mapped_bytes);
  allocation.data = static_cast<std::byte*>(data);
  used_bytes_ += bytes;
  const auto value = reinterpret_cast<uint64_t>(address);
  allocations_.emplace(value, allocation);
  return DeviceAddress{value};
}

void EmulatedMemory::Free(DeviceAddress memory) {
  const absl::MutexLock lock(&mu_);
  const auto found = allocations_.find(memory.value);
  if (found == allocations_.end()) return;
  munmap(reinterpret_cast<void*>(memory.value), found->second.mapped_bytes);
  munmap(found->second.data, found->second.mapped_bytes);
  used_bytes_ -= found->second.bytes;
  allocations_.erase(found);
}

std::byte* EmulatedMemory::Find(DeviceAddress address, uint64_t bytes) const {
  const absl::ReaderMutexLock lock(&mu_);
  const auto next = allocations_.upper_bound(address.value);
  if (next == allocations_.begin()) return nullptr;
  const auto& [begin, allocation] = *std::prev(next);
  const uint64_t offset = address.value - begin;
  if (offset > allocation.bytes || allocation.bytes - offset < bytes) {
    return nullptr;
  }
  return allocation.data + offset;
}

}  // namespace optstate::accelerator
