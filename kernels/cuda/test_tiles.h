#ifndef OPTSTATE_KERNELS_CUDA_TEST_TILES_H_
#define OPTSTATE_KERNELS_CUDA_TEST_TILES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
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

// Memory of the host, aligned as that of a device is.
struct AlignedMemory {
  static void* Allocate(size_t bytes) {
    constexpr size_t kAlignBytes = 256;
    return std::aligned_alloc(
        kAlignBytes, (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes);
  }
  static void Free(void* memory) { std::free(memory); }
  static void Copy(void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
  }
};

// Copies of arrays in `Memory`, each with a guard behind it.
template <class Memory>
class Copies {
 public:
  Copies() = default;
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  ~Copies() {
    for (const Copy& copy : copies_) Memory::Free(copy.memory);
  }

  // Returns the copy of an array, null for null.
  template <class T>
  T* Add(T* array, size_t bytes) {
    if (array == nullptr) return nullptr;
    std::vector<uint8_t> guarded(bytes + kGuardBytes, kGuard);
    std::memcpy(guarded.data(), array, bytes);
    void* const memory = Memory::Allocate(guarded.size());
    Memory::Copy(memory, guarded.data(), guarded.size());
    copies_.push_back(
        {const_cast<void*>(static_cast<const void*>(array)), memory, bytes});
    return static_cast<T*>(memory);
  }
  // Copies everything back to where it came from.
  void CopyBack() const {
    for (const Copy& copy : copies_) {
      std::vector<uint8_t> guarded(copy.bytes + kGuardBytes);
      Memory::Copy(guarded.data(), copy.memory, guarded.size());
      std::memcpy(copy.array, guarded.data(), copy.bytes);
      EXPECT_EQ(std::count(guarded.end() - kGuardBytes, guarded.end(), kGuard),
                static_cast<std::ptrdiff_t>(kGuardBytes))
          << "something was written behind an array";
    }
  }

 private:
  static constexpr size_t kGuardBytes = 64;
  static constexpr uint8_t kGuard = 0xA5;

  struct Copy {
    void* array;
    void* memory;
    size_t bytes;
  };
  std::vector<Copy> copies_;
};

// The arrays of a view, by number.
enum class ViewArray { kGradients, kParameter, kMaster, kState, kNone };

// Lets `update(view, inputs)` update aligned copies of the arrays of `view`,
// then copies the new values back. `inputs` takes what is only read. Arrays
// `left` stay where they are, if that is memory for `update`.
template <class Memory, class Update>
bool UpdateCopies(const UpdateKernelKey& key, const TileView& view,
                  const Update& update, ViewArray left = ViewArray::kNone) {
  Copies<Memory> arrays;
  Copies<Memory> inputs;
  const auto copy = [&](ViewArray which, auto* array, size_t bytes) {
    return which == left ? array : arrays.Add(array, bytes);
  };
  TileView moved = view;
  if (left != ViewArray::kGradients) {
    std::vector<const void*> gradients;
    for (const void* gradient : view.gradients) {
      gradients.push_back(
          inputs.Add(gradient, view.numel * SizeInBytes(key.gradient)));
    }
    moved.gradients = {inputs.Add(std::as_const(gradients).data(),
                                  gradients.size() * sizeof(void*)),
                       gradients.size()};
  }
  moved.parameter = copy(ViewArray::kParameter, view.parameter,
                         view.numel * SizeInBytes(key.parameter));
  moved.master = view.master == view.parameter
                     ? moved.parameter
                     : copy(ViewArray::kMaster, view.master,
                            view.numel * scalar::BytesOfMaster(key.master));
  const size_t blocks =
      (view.numel + kQuantizedBlockElements - 1) / kQuantizedBlockElements;
  for (int k = 0; k < kStateArraysMax; ++k) {
    moved.state[k] = copy(ViewArray::kState, view.state[k],
                          view.numel * SizeInBytes(key.state));
    moved.scale[k] = arrays.Add(view.scale[k], blocks * sizeof(float));
  }
  if (!update(moved, &inputs)) return false;
  arrays.CopyBack();
  return true;
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_TEST_TILES_H_
