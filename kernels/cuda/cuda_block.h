#ifndef OPTSTATE_KERNELS_CUDA_CUDA_BLOCK_H_
#define OPTSTATE_KERNELS_CUDA_CUDA_BLOCK_H_

#include <cstdint>

namespace optstate::kernels::cuda {

// A block of CUDA's threads: see block_kernels.h. For .cu files.
class CudaBlock {
 public:
  template <class T>
  class PerThread {
   public:
    __device__ T& operator[](uint32_t) { return value_; }

   private:
    T value_;
  };

  template <class Phase>
  __device__ void Run(const Phase& phase) const {
    phase(threadIdx.x);
    __syncthreads();
  }

  static __device__ void Raise(int32_t* largest, int32_t value) {
    atomicMax(largest, value);
  }
};

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_CUDA_BLOCK_H_
