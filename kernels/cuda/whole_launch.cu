#include <cstdint>

#include "kernels/cuda/cuda_block.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/whole_blocks.h"
#include "kernels/cuda/whole_task.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {
namespace {

template <class Rule, WholePhase kPhase>
__global__ void __launch_bounds__(kBlockThreads)
    RunPhase(const WholeTask* __restrict__ tasks, uint32_t round) {
  __shared__ WholeShared shared;
  constexpr uint32_t kParts = WholeParts(kPhase);
  RunWholePhase<Rule, kPhase>(CudaBlock(), tasks[blockIdx.x / kParts],
                              blockIdx.x % kParts, round, &shared);
}

template <class Rule, WholePhase kPhase>
cudaError_t LaunchPhase(const WholeTask* tasks, uint32_t count, uint32_t round,
                        cudaStream_t stream) {
  RunPhase<Rule, kPhase>
      <<<count * WholeParts(kPhase), kBlockThreads, 0, stream>>>(tasks, round);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchWhole(OptimizerKind kind, const WholeTask* tasks,
                        uint32_t count, uint32_t rounds, cudaStream_t stream) {
  if (!HasWholeBlocks(kind)) return cudaErrorNotSupported;
  if (count == 0) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  VisitWholeRule(kind, [&]<class Rule>() {
    return VisitWholePhases<Rule>(
        rounds, [&]<WholePhase kPhase>(uint32_t round) {
          error = LaunchPhase<Rule, kPhase>(tasks, count, round, stream);
          return error == cudaSuccess;
        });
  });
  return error;
}

}  // namespace optstate::kernels::cuda
