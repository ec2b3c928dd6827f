#include <cstdint>

#include "kernels/cuda/block_kernels.h"
#include "kernels/cuda/cuda_block.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/ops/scalar_ops.h"
// This include comes after scalar_ops.h.
#include "kernels/reduction.h"
#include "kernels/rules/all_rules-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {
namespace {

template <class Rule>
__global__ void __launch_bounds__(kBlockThreads)
    UpdateTiles(const TileTask* __restrict__ tasks,
                const UpdateFactors* __restrict__ factors) {
  __shared__ UpdateShared shared;
  const TileTask& task = tasks[blockIdx.x];
  UpdateTile<Rule>(CudaBlock(), task, factors[task.factors], &shared);
}

template <Reduction kReduction>
__global__ void __launch_bounds__(kBlockThreads)
    ReduceTiles(const ReduceTask* tasks, uint32_t count, double* results,
                uint32_t* found_inf) {
  __shared__ ReduceShared shared;
  ReduceArrays<kReduction>(CudaBlock(), tasks, blockIdx.x * kBlockArrays, count,
                           results, found_inf, &shared);
}

__global__ void __launch_bounds__(kBlockThreads)
    AddTilesOfParameters(const ParameterTasks* parameters, uint32_t count,
                         const double* results, double* sums) {
  const uint32_t k = blockIdx.x * kBlockThreads + threadIdx.x;
  if (k < count) AddTiles(parameters[k], results, sums + k);
}

uint32_t BlocksOf(uint32_t count, uint32_t per_block) {
  return count / per_block + (count % per_block != 0 ? 1 : 0);
}

}  // namespace

cudaError_t LaunchUpdate(OptimizerKind kind, uint32_t options,
                         const TileTask* tasks, uint32_t count,
                         const UpdateFactors* factors, cudaStream_t stream) {
  const auto launch = [&]<class Rule>() {
    if (count == 0) return cudaSuccess;
    UpdateTiles<Rule><<<count, kBlockThreads, 0, stream>>>(tasks, factors);
    return cudaGetLastError();
  };
  switch (kind) {
#define OPTSTATE_LAUNCH_CASE(KIND, NAME) \
  case OptimizerKind::KIND:              \
    return scalar::Visit##NAME(kind, options, launch);
    OPTSTATE_RULES(OPTSTATE_LAUNCH_CASE)
#undef OPTSTATE_LAUNCH_CASE
    default:
      return cudaErrorNotSupported;
  }
}

cudaError_t LaunchReduce(Reduction reduction, const ReduceTask* tasks,
                         uint32_t count, double* results, uint32_t* found_inf,
                         cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const uint32_t blocks = BlocksOf(count, kBlockArrays);
  switch (reduction) {
    case Reduction::kSumOfSquares:
      ReduceTiles<Reduction::kSumOfSquares>
          <<<blocks, kBlockThreads, 0, stream>>>(tasks, count, results,
                                                 found_inf);
      break;
    case Reduction::kSumOfAbsolutes:
      ReduceTiles<Reduction::kSumOfAbsolutes>
          <<<blocks, kBlockThreads, 0, stream>>>(tasks, count, results,
                                                 found_inf);
      break;
    case Reduction::kLargestAbsolute:
      ReduceTiles<Reduction::kLargestAbsolute>
          <<<blocks, kBlockThreads, 0, stream>>>(tasks, count, results,
                                                 found_inf);
      break;
  }
  return cudaGetLastError();
}

cudaError_t LaunchAddTiles(const ParameterTasks* parameters, uint32_t count,
                           const double* results, double* sums,
                           cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  AddTilesOfParameters<<<BlocksOf(count, kBlockThreads), kBlockThreads, 0,
                         stream>>>(parameters, count, results, sums);
  return cudaGetLastError();
}

}  // namespace optstate::kernels::cuda
