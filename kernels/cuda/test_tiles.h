#ifndef OPTSTATE_KERNELS_CUDA_TEST_TILES_H_
#define OPTSTATE_KERNELS_CUDA_TEST_TILES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/tile_task.h"
#include "kernels/scalar/element_update.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {

// Returns the tasks that update a view as tiles of `tile_elements`, with the
// addresses of the view and the factors at place 1.
inline std::vector<TileTask> TilesOf(const UpdateKernelKey& key,
                                     const UpdateFactors& factors,
                                     const TileView& view,
                                     size_t tile_elements) {
  std::vector<TileTask> tasks;
  const scalar::TileElements whole = scalar::TileElementsOf(key, factors, view);
  const auto advance = [](void* array, size_t bytes) -> void* {
    return array == nullptr ? nullptr : static_cast<uint8_t*>(array) + bytes;
  };
  for (size_t begin = 0; begin < view.numel; begin += tile_elements) {
    TileTask task = {whole, std::min(tile_elements, view.numel - begin), 0, 1};
    scalar::TileElements& tile = task.tile;
    tile.parameter =
        advance(tile.parameter, begin * SizeInBytes(key.parameter));
    tile.master =
        advance(tile.master, begin * scalar::BytesOfMaster(key.master));
    for (int k = 0; k < kStateArraysMax; ++k) {
      tile.state[k] = advance(tile.state[k], begin * SizeInBytes(key.state));
      if (tile.scale[k] != nullptr) {
        tile.scale[k] += begin / kQuantizedBlockElements;
      }
    }
    tile.gradient.begin = begin;
    tile.flat = view.flat_begin + begin;
    tile.random = scalar::RandomKeysOf(factors.random_seed, tile.flat);
    tasks.push_back(task);
  }
  return tasks;
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_TEST_TILES_H_
