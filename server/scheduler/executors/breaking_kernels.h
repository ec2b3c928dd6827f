#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BREAKING_KERNELS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BREAKING_KERNELS_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "proto/types/optimizer.h"
#include "server/scheduler/executors/device_kernels.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// Kernels of CUDA of which one launch is given an address without memory.
class BreakingKernels final : public DeviceKernels {
 public:
  explicit BreakingKernels(int launches) : launches_(launches) {}

  absl::Status CanUpdate(OptimizerKind kind) const override {
    return CudaKernels()->CanUpdate(kind);
  }
  absl::Status Update(OptimizerKind kind, uint32_t options,
                      accelerator::DeviceAddress tasks, uint32_t count,
                      accelerator::DeviceAddress factors,
                      accelerator::DeviceStream* stream) const override {
    if (launches_-- == 0) tasks = {64};
    return CudaKernels()->Update(kind, options, tasks, count, factors, stream);
  }
  absl::Status UpdateWhole(OptimizerKind kind, accelerator::DeviceAddress tasks,
                           uint32_t count, uint32_t rounds,
                           accelerator::DeviceStream* stream) const override {
    return CudaKernels()->UpdateWhole(kind, tasks, count, rounds, stream);
  }
  absl::Status Digest(accelerator::DeviceAddress tasks, uint32_t count,
                      accelerator::DeviceAddress digests,
                      accelerator::DeviceStream* stream) const override {
    return CudaKernels()->Digest(tasks, count, digests, stream);
  }

 private:
  mutable std::atomic<int> launches_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BREAKING_KERNELS_H_
