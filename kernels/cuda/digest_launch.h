#ifndef OPTSTATE_KERNELS_CUDA_DIGEST_LAUNCH_H_
#define OPTSTATE_KERNELS_CUDA_DIGEST_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/digest.h"

namespace optstate::kernels::cuda {

// Computes the digests of `count` arrays: see launch.h.
cudaError_t LaunchDigest(const DigestTask* tasks, uint32_t count,
                         uint64_t* digests, cudaStream_t stream);

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_DIGEST_LAUNCH_H_
