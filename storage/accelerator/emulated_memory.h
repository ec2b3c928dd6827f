#ifndef OPTSTATE_STORAGE_ACCELERATOR_EMULATED_MEMORY_H_
#define OPTSTATE_STORAGE_ACCELERATOR_EMULATED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/unique_fd.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::accelerator {

// The memory of an emulated device. An allocation is two mappings: one without
// access, whose addresses are the device's, and one with the bytes.
// So a host that follows a device's address is killed by SIGSEGV, as it is with
// a real one, and an address that is not the device's is not found.
//
// Bytes that are shared are those of a sealed memfd, which other processes can
// only read: one that writes there is killed by SIGSEGV.
//
// Thread-safe.
class EmulatedMemory {
 public:
  explicit EmulatedMemory(uint64_t bytes) : bytes_(bytes) {}
  EmulatedMemory(const EmulatedMemory&) = delete;
  EmulatedMemory& operator=(const EmulatedMemory&) = delete;
  ~EmulatedMemory();

  // RESOURCE_EXHAUSTED, with what is needed and left: the device's memory is
  // used up.
  absl::StatusOr<DeviceAddress> Allocate(uint64_t bytes);
  // See Device. `bytes` of Import() are those that Export() said.
  absl::StatusOr<DeviceAddress> AllocateShareable(uint64_t bytes);
  absl::StatusOr<UniqueFd> Export(DeviceAddress memory, uint64_t* bytes) const;
  // Memory of another process takes none of this device's.
  absl::StatusOr<DeviceAddress> Import(int file, uint64_t bytes);
  void Free(DeviceAddress memory);
  // Returns where the bytes of a device's address are; null unless one
  // allocation has all of them.
  std::byte* Find(DeviceAddress address, uint64_t bytes) const;
  // Returns the same for an address that a kernel was given.
  template <typename T>
  T* Find(const T* address, uint64_t bytes) const {
    return reinterpret_cast<T*>(
        Find(DeviceAddress{reinterpret_cast<uint64_t>(address)}, bytes));
  }

 private:
  struct Allocation {
    uint64_t bytes = 0;
    uint64_t mapped_bytes = 0;
    uint64_t used_bytes = 0;  // of the device; 0: another process has them
    std::byte* data = nullptr;
    shm::SealedSegment shared;  // has the data, when it may be exported
    shm::PeerSegment imported;  // has the data, when it was imported
  };

  absl::Status CheckRoom(uint64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Gives the allocation, which has its data, an address.
  absl::StatusOr<DeviceAddress> Add(Allocation allocation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static void Unmap(const Allocation& allocation);

  const uint64_t bytes_;
  mutable absl::Mutex mu_;
  uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Allocation> allocations_ ABSL_GUARDED_BY(mu_);
};

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_EMULATED_MEMORY_H_
