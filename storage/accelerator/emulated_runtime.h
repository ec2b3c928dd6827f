#ifndef OPTSTATE_STORAGE_ACCELERATOR_EMULATED_RUNTIME_H_
#define OPTSTATE_STORAGE_ACCELERATOR_EMULATED_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/emulated_faults.h"

namespace optstate::accelerator {

struct EmulatedOptions {
  size_t devices = 1;
  uint64_t memory_bytes = uint64_t{1} << 30;  // of each
  // The bandwidth of copies, of each stream; 0: as fast as they are.
  uint64_t link_bytes_per_s = 0;
  // Faults of any of its devices; null: none. It outlives them.
  EmulatedFaults* faults = nullptr;
};

// Makes devices that are made of threads and memory of this process, so that
// all that the host does for a device runs without one: a stream is a thread,
// and a kernel a function (EmulatedStream::Launch). They are no faster than the
// host.
std::unique_ptr<DeviceRuntime> MakeEmulatedRuntime(
    const EmulatedOptions& options);

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_EMULATED_RUNTIME_H_
