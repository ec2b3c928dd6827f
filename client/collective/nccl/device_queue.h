#ifndef OPTSTATE_CLIENT_COLLECTIVE_NCCL_DEVICE_QUEUE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NCCL_DEVICE_QUEUE_H_

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace optstate::client {

// The stream of a device on which NCCL works, and the device's memory: what
// NCCL itself does not say. CudaQueue asks the CUDA driver; tests have a queue
// of the host.
//
// Threads: one at a time.
class DeviceQueue {
 public:
  virtual ~DeviceQueue() = default;

  // Does something with the device as the current one of this thread.
  virtual absl::Status WithDevice(absl::FunctionRef<absl::Status()> what) = 0;

  // The rest is called within WithDevice().

  // The stream, as NCCL takes it.
  virtual void* stream() const = 0;
  // INVALID_ARGUMENT: the device does not reach this memory at this address.
  virtual absl::Status CheckMemory(const void* address) const = 0;
  // Returns whether all work of the stream is done. An error is the device's.
  virtual absl::StatusOr<bool> IsDone() = 0;
  // 16 bytes of the device's memory, for barriers.
  virtual void* scratch() const = 0;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NCCL_DEVICE_QUEUE_H_
