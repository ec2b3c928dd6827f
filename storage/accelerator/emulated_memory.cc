#include "storage/accelerator/emulated_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::accelerator {
namespace {

constexpr uint64_t kPageBytes = 4096;

uint64_t PageAligned(uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

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
    Unmap(allocation);
  }
}

void EmulatedMemory::Unmap(const Allocation& allocation) {
  // Shared bytes are unmapped by their segments.
  if (allocation.shared.data() != nullptr ||
      allocation.imported.data() != nullptr) {
    return;
  }
  munmap(allocation.data, allocation.mapped_bytes);
}

absl::Status EmulatedMemory::CheckRoom(uint64_t bytes) const {
  if (bytes == 0) return absl::InvalidArgumentError("no bytes are allocated");
  if (bytes > bytes_ - used_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the device has ", bytes_ - used_bytes_, " of ", bytes_,
                     " bytes left, ", bytes, " are needed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceAddress> EmulatedMemory::Add(Allocation allocation) {
  void* const address = Map(allocation.mapped_bytes, PROT_NONE);
  if (address == nullptr) {
    const int error = errno;
    Unmap(allocation);
    return OsError(error, "mmap of device addresses");
  }
  used_bytes_ += allocation.used_bytes;
  const auto value = reinterpret_cast<uint64_t>(address);
  allocations_.emplace(value, std::move(allocation));
  return DeviceAddress{value};
}

absl::StatusOr<DeviceAddress> EmulatedMemory::Allocate(uint64_t bytes) {
  const absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRoom(bytes));
  Allocation allocation;
  allocation.bytes = allocation.used_bytes = bytes;
  allocation.mapped_bytes = PageAligned(bytes);
  void* const data = Map(allocation.mapped_bytes, PROT_READ | PROT_WRITE);
  if (data == nullptr) {
    return OsError(errno, "mmap of an emulated device's memory");
  }
  // Fresh memory of a device has any content; zeros would hide a missing copy.
  std::memset(data, 0xA5, allocation.mapped_bytes);
  allocation.data = static_cast<std::byte*>(data);
  return Add(std::move(allocation));
}

absl::StatusOr<DeviceAddress> EmulatedMemory::AllocateShareable(
    uint64_t bytes) {
  const absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckRoom(bytes));
  Allocation allocation;
  allocation.bytes = allocation.used_bytes = bytes;
  allocation.mapped_bytes = PageAligned(bytes);
  OPTSTATE_ASSIGN_OR_RETURN(
      allocation.shared, shm::SealedSegment::Create("optstate-emulated-device",
                                                    allocation.mapped_bytes));
  allocation.data = allocation.shared.data();
  std::memset(allocation.data, 0xA5, allocation.mapped_bytes);
  return Add(std::move(allocation));
}

absl::StatusOr<UniqueFd> EmulatedMemory::Export(DeviceAddress memory,
                                                uint64_t* bytes) const {
  const absl::ReaderMutexLock lock(&mu_);
  const auto found = allocations_.find(memory.value);
  if (found == allocations_.end() || found->second.shared.data() == nullptr) {
    return absl::InvalidArgumentError(
        "memory that was not allocated to be shared is exported");
  }
  UniqueFd file(fcntl(found->second.shared.fd(), F_DUPFD_CLOEXEC, 0));
  if (!file.ok()) {
    return OsError(errno, "fcntl(F_DUPFD_CLOEXEC) of an emulated device");
  }
  *bytes = found->second.mapped_bytes;
  return file;
}

absl::StatusOr<DeviceAddress> EmulatedMemory::Import(int file, uint64_t bytes) {
  UniqueFd own(fcntl(file, F_DUPFD_CLOEXEC, 0));
  if (!own.ok()) {
    return absl::InvalidArgumentError(
        "the exported memory of an emulated device has no file");
  }
  const absl::MutexLock lock(&mu_);
  Allocation allocation;
  allocation.bytes = allocation.mapped_bytes = bytes;
  OPTSTATE_ASSIGN_OR_RETURN(allocation.imported,
                            shm::PeerSegment::Map(std::move(own), bytes));
  // Nobody writes there: the pages are mapped for reading alone.
  allocation.data = const_cast<std::byte*>(allocation.imported.data());
  return Add(std::move(allocation));
}

void EmulatedMemory::Free(DeviceAddress memory) {
  const absl::MutexLock lock(&mu_);
  const auto found = allocations_.find(memory.value);
  if (found == allocations_.end()) return;
  munmap(reinterpret_cast<void*>(memory.value), found->second.mapped_bytes);
  Unmap(found->second);
  used_bytes_ -= found->second.used_bytes;
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
