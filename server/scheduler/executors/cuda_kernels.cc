#include "absl/strings/str_cat.h"
#include "server/scheduler/executors/device_kernels.h"
#include "storage/accelerator/cuda_runtime.h"

#ifdef OPTSTATE_HAS_CUDA
#include "kernels/cuda/digest.h"
#include "kernels/cuda/digest_launch.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/update_kernel.h"
#endif

namespace optstate::scheduler {
namespace {

#ifdef OPTSTATE_HAS_CUDA

class Cuda final : public DeviceKernels {
 public:
  // A launch of nothing asks for no device.
  absl::Status CanUpdate(OptimizerKind kind) const override {
    if (kernels::cuda::LaunchUpdate(kind, /*options=*/0, nullptr, /*count=*/0,
                                    nullptr, nullptr) == cudaSuccess ||
        kernels::cuda::LaunchWhole(kind, nullptr, /*count=*/0, /*rounds=*/0,
                                   nullptr) == cudaSuccess) {
      return absl::OkStatus();
    }
    return absl::UnimplementedError(absl::StrCat(
        "no device has a kernel of the optimizer ", InfoOf(kind).name,
        ", which needs whole parameters: the CPU alone updates them"));
  }

  absl::Status Update(OptimizerKind kind, uint32_t options,
                      accelerator::DeviceAddress tasks, uint32_t count,
                      accelerator::DeviceAddress factors,
                      accelerator::DeviceStream* stream) const override {
    const cudaError_t error = kernels::cuda::LaunchUpdate(
        kind, options, tasks.ForKernel<const kernels::cuda::TileTask>(), count,
        factors.ForKernel<const kernels::UpdateFactors>(),
        static_cast<cudaStream_t>(stream->native_handle()));
    if (error == cudaSuccess) return absl::OkStatus();
    return accelerator::StatusOfCuda(error, "launch of an update");
  }

  absl::Status UpdateWhole(OptimizerKind kind, accelerator::DeviceAddress tasks,
                           uint32_t count, uint32_t rounds,
                           accelerator::DeviceStream* stream) const override {
    const cudaError_t error = kernels::cuda::LaunchWhole(
        kind, tasks.ForKernel<const kernels::cuda::WholeTask>(), count, rounds,
        static_cast<cudaStream_t>(stream->native_handle()));
    if (error == cudaSuccess) return absl::OkStatus();
    return accelerator::StatusOfCuda(error,
                                     "launch of updates of whole parameters");
  }

  absl::Status Digest(accelerator::DeviceAddress tasks, uint32_t count,
                      accelerator::DeviceAddress digests,
                      accelerator::DeviceStream* stream) const override {
    const cudaError_t error = kernels::cuda::LaunchDigest(
        tasks.ForKernel<const kernels::cuda::DigestTask>(), count,
        digests.ForKernel<uint64_t>(),
        static_cast<cudaStream_t>(stream->native_handle()));
    if (error == cudaSuccess) return absl::OkStatus();
    return accelerator::StatusOfCuda(error, "launch of digests");
  }
};

#else

class Cuda final : public DeviceKernels {
 public:
  absl::Status CanUpdate(OptimizerKind /*kind*/) const override {
    return accelerator::StatusOfCuda(0, "");
  }
  absl::Status Update(OptimizerKind /*kind*/, uint32_t /*options*/,
                      accelerator::DeviceAddress /*tasks*/, uint32_t /*count*/,
                      accelerator::DeviceAddress /*factors*/,
                      accelerator::DeviceStream* /*stream*/) const override {
    return accelerator::StatusOfCuda(0, "");
  }
  absl::Status UpdateWhole(
      OptimizerKind /*kind*/, accelerator::DeviceAddress /*tasks*/,
      uint32_t /*count*/, uint32_t /*rounds*/,
      accelerator::DeviceStream* /*stream*/) const override {
    return accelerator::StatusOfCuda(0, "");
  }
  absl::Status Digest(accelerator::DeviceAddress /*tasks*/, uint32_t /*count*/,
                      accelerator::DeviceAddress /*digests*/,
                      accelerator::DeviceStream* /*stream*/) const override {
    return accelerator::StatusOfCuda(0, "");
  }
};

#endif

}  // namespace

const DeviceKernels* CudaKernels() {
  static const Cuda kernels;
  return &kernels;
}

}  // namespace optstate::scheduler
