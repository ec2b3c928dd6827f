#ifndef OPTSTATE_CLIENT_COLLECTIVE_NCCL_CUDA_QUEUE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NCCL_CUDA_QUEUE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "client/collective/nccl/device_queue.h"

namespace optstate::client {

// Opens a stream of a CUDA device by the driver, libcuda.so.1, which is opened
// at run time.
//
// `device`: its ordinal, as CUDA_VISIBLE_DEVICES leaves it. `stream`: a
// cudaStream_t of the device's primary context (the one of the CUDA run time
// and of torch), which outlives the queue; null: the default stream.
//
// NOT_FOUND: there is no driver, or no such device. Other errors are CUDA's,
// with its name for them.
absl::StatusOr<std::unique_ptr<DeviceQueue>> MakeCudaQueue(int device,
                                                           void* stream);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NCCL_CUDA_QUEUE_H_
