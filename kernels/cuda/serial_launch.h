#ifndef OPTSTATE_KERNELS_CUDA_SERIAL_LAUNCH_H_
#define OPTSTATE_KERNELS_CUDA_SERIAL_LAUNCH_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cuda/digest.h"
#include "kernels/cuda/serial_block.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {

// Does what LaunchUpdate of launch.h has a device do, in the calling thread,
// with addresses of the host. false: the optimizer has no such kernel.
bool UpdateSerially(SerialBlock::Order order, OptimizerKind kind,
                    uint32_t options, absl::Span<const TileTask> tasks,
                    const UpdateFactors* factors);

// Likewise for LaunchWhole.
bool UpdateWholeSerially(SerialBlock::Order order, OptimizerKind kind,
                         absl::Span<const WholeTask> tasks, uint32_t rounds);

// Runs what LaunchDigest of digest_launch.h does for one array, on the host.
uint64_t DigestSerially(SerialBlock::Order order, const DigestTask& task);

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_SERIAL_LAUNCH_H_
