#ifndef OPTSTATE_KERNELS_CUDA_LAUNCH_H_
#define OPTSTATE_KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/tile_task.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/reduction.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {

// Launches of the kernels over many tiles. All arrays are the device's; they
// must live until the launch is over. Returns what the launch returned: whether
// the kernel ran well is known when the stream is waited for.

// Updates `count` tiles as UpdateKernel::apply does, with equal bits.
// cudaErrorNotSupported: the optimizer has no such kernel.
cudaError_t LaunchUpdate(OptimizerKind kind, uint32_t options,
                         const TileTask* tasks, uint32_t count,
                         const UpdateFactors* factors, cudaStream_t stream);

// Updates `count` parameters as WholeKernel::compute does, with equal bits.
// `rounds`: RoundsOf() them. cudaErrorNotSupported: the optimizer has no such
// kernel.
cudaError_t LaunchWhole(OptimizerKind kind, const WholeTask* tasks,
                        uint32_t count, uint32_t rounds, cudaStream_t stream);

// Reduces `count` arrays as Reduce of kernels/reduce.h does, with equal bits.
// Sets *found_inf, which the caller has cleared, where an element is NaN or
// infinite.
cudaError_t LaunchReduce(Reduction reduction, const ReduceTask* tasks,
                         uint32_t count, double* results, uint32_t* found_inf,
                         cudaStream_t stream);

// Adds the results of each parameter's tasks.
cudaError_t LaunchAddTiles(const ParameterTasks* parameters, uint32_t count,
                           const double* results, double* sums,
                           cudaStream_t stream);

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_LAUNCH_H_
