#include <cstdint>

#include "kernels/cuda/block_kernels.h"
#include "kernels/cuda/cuda_block.h"
#include "kernels/cuda/digest.h"
#include "kernels/cuda/digest_launch.h"

namespace optstate::kernels::cuda {
namespace {

static_assert(kDigestThreads == kBlockThreads);

__global__ void __launch_bounds__(kDigestThreads)
    DigestArrays(const DigestTask* tasks, uint64_t* digests) {
  __shared__ DigestShared shared;
  DigestArray(CudaBlock(), tasks[blockIdx.x], digests + blockIdx.x, &shared);
}

}  // namespace

cudaError_t LaunchDigest(const DigestTask* tasks, uint32_t count,
                         uint64_t* digests, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  DigestArrays<<<count, kDigestThreads, 0, stream>>>(tasks, digests);
  return cudaGetLastError();
}

}  // namespace optstate::kernels::cuda
