#ifndef OPTSTATE_KERNELS_OPS_HOST_DEVICE_H_
#define OPTSTATE_KERNELS_OPS_HOST_DEVICE_H_

// Marks a function that a CUDA thread may call too. Nothing where no CUDA
// compiler reads it.
#ifdef __CUDACC__
#define OPTSTATE_HOST_DEVICE __host__ __device__
#else
#define OPTSTATE_HOST_DEVICE
#endif

#endif  // OPTSTATE_KERNELS_OPS_HOST_DEVICE_H_
