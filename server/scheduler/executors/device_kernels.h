#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_KERNELS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_KERNELS_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "proto/types/optimizer.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// The update kernels of one kind of device, whose bits are those of the CPU's
// (kernels/README.md).
//
// Threads: thread-safe for different streams.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  // Returns UNIMPLEMENTED, naming it, for an optimizer without such a kernel.
  // All dtypes and formats of one that has it are there.
  virtual absl::Status CanUpdate(OptimizerKind kind) const = 0;

  // Enqueues the update of `count` tiles. `tasks` has as many
  // kernels::cuda::TileTask and `factors` the kernels::UpdateFactors that they
  // name, both in the device's memory until the stream has passed this.
  // Errors: those of storage/accelerator/device_runtime.h.
  virtual absl::Status Update(OptimizerKind kind, uint32_t options,
                              accelerator::DeviceAddress tasks, uint32_t count,
                              accelerator::DeviceAddress factors,
                              accelerator::DeviceStream* stream) const = 0;

  // Enqueues the update of `count` whole parameters, for an optimizer that
  // needs them. `tasks` has as many kernels::cuda::WholeTask, and `rounds` is
  // what RoundsOf() says of them; all else is as above.
  virtual absl::Status UpdateWhole(OptimizerKind kind,
                                   accelerator::DeviceAddress tasks,
                                   uint32_t count, uint32_t rounds,
                                   accelerator::DeviceStream* stream) const = 0;

  // Enqueues the digests of `count` arrays: `tasks` has as many
  // kernels::cuda::DigestTask, and `digests` gets a uint64_t for each. All else
  // is as above.
  virtual absl::Status Digest(accelerator::DeviceAddress tasks, uint32_t count,
                              accelerator::DeviceAddress digests,
                              accelerator::DeviceStream* stream) const = 0;
};

// Returns the kernels of emulated devices, which live as long as the process:
// the blocks of CUDA's threads, done by loops.
const DeviceKernels* EmulatedKernels();

// Returns those of CUDA's devices. In a build without device code CanUpdate()
// is FAILED_PRECONDITION for every optimizer.
const DeviceKernels* CudaKernels();

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_KERNELS_H_
