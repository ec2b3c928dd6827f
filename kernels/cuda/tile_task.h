#ifndef OPTSTATE_KERNELS_CUDA_TILE_TASK_H_
#define OPTSTATE_KERNELS_CUDA_TILE_TASK_H_

#include <cstddef>
#include <cstdint>

#include "kernels/scalar/element_update.h"

namespace optstate::kernels::cuda {

// The work of one block of threads in a launch over many tiles. All addresses
// are the device's, those in `tile` too: of the gradients, and of the array of
// their addresses.
struct TileTask {
  scalar::TileElements tile;
  uint64_t numel;
  // Elements before this one are left alone. With kDynamic8 it begins a block.
  uint64_t begin;
  // The place of the parameter's factors among those of the launch.
  uint32_t factors;
};

// Returns the task of a whole view, whose addresses are the device's.
// `factors_place`: see TileTask::factors.
inline TileTask TileTaskOf(const UpdateKernelKey& key,
                           const UpdateFactors& factors, const TileView& view,
                           uint32_t factors_place) {
  return {scalar::TileElementsOf(key, factors, view), view.numel, view.begin,
          factors_place};
}

// One array to reduce: the part of a parameter in one tile.
struct ReduceTask {
  scalar::GradientElements gradient;
  uint64_t numel;
};

// The tasks of one parameter, in the order of its tiles.
struct ParameterTasks {
  uint32_t begin;
  uint32_t end;
};

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_TILE_TASK_H_
