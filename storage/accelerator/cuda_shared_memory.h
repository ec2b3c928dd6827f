#ifndef OPTSTATE_STORAGE_ACCELERATOR_CUDA_SHARED_MEMORY_H_
#define OPTSTATE_STORAGE_ACCELERATOR_CUDA_SHARED_MEMORY_H_

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/unique_fd.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::accelerator {

// Memory of a CUDA device that processes share, by the driver's management of
// virtual memory: the memory has a file descriptor, and lives until nobody has
// it mapped any more. (Memory of cudaIpcGetMemHandle() must not be freed while
// another process has it, which no process can know of another.)
//
// The functions of the driver are looked for in libcuda.so.1 when they are
// needed first: CUDA's runtime has none for this. The caller has made the
// device that of the calling thread.
//
// Threads: thread-safe.
class CudaSharedMemory {
 public:
  explicit CudaSharedMemory(int device) : device_(device) {}
  CudaSharedMemory(const CudaSharedMemory&) = delete;
  CudaSharedMemory& operator=(const CudaSharedMemory&) = delete;

  // See Device. FAILED_PRECONDITION: there is no driver that can do it, or this
  // device cannot.
  absl::StatusOr<DeviceAddress> Allocate(uint64_t bytes);
  absl::StatusOr<UniqueFd> Export(DeviceAddress memory, uint64_t* bytes) const;
  absl::StatusOr<DeviceAddress> Import(int file, uint64_t bytes);
  // Returns false when the memory is none of these.
  bool Free(DeviceAddress memory);

 private:
  struct Mapping {
    uint64_t bytes = 0;
    uint64_t handle = 0;  // the driver's
  };

  // Maps the memory of a handle, which it takes: also when it fails.
  absl::StatusOr<DeviceAddress> Map(uint64_t handle, uint64_t bytes);

  const int device_;
  mutable absl::Mutex mu_;
  std::map<uint64_t, Mapping> mappings_ ABSL_GUARDED_BY(mu_);  // by address
};

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_CUDA_SHARED_MEMORY_H_
