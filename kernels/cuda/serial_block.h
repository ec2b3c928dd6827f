#ifndef OPTSTATE_KERNELS_CUDA_SERIAL_BLOCK_H_
#define OPTSTATE_KERNELS_CUDA_SERIAL_BLOCK_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/cuda/block_kernels.h"

namespace optstate::kernels::cuda {

// A block of threads without a GPU: the threads take turns, phase by phase. See
// block_kernels.h.
class SerialBlock {
 public:
  template <class T>
  using PerThread = std::array<T, kBlockThreads>;

  // The order of the threads. Results must not hang on it.
  enum class Order { kUp, kDown };
  explicit SerialBlock(Order order) : order_(order) {}

  template <class Phase>
  void Run(const Phase& phase) const {
    for (uint32_t t = 0; t < kBlockThreads; ++t) {
      phase(order_ == Order::kUp ? t : kBlockThreads - 1 - t);
    }
  }

  static void Raise(int32_t* largest, int32_t value) {
    *largest = std::max(*largest, value);
  }

 private:
  const Order order_;
};

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_SERIAL_BLOCK_H_
