#ifndef OPTSTATE_KERNELS_CPU_DIGEST_H_
#define OPTSTATE_KERNELS_CPU_DIGEST_H_

#include <cstdint>

#include "kernels/cpu/targets.h"

namespace optstate::kernels::cpu {

// Returns the digest of kernels/cuda/digest.h of an array in host memory, at
// any address, computed on a target. Thread-safe.
uint64_t DigestOn(Target target, const void* data, uint64_t bytes);

inline uint64_t DigestOf(const void* data, uint64_t bytes) {
  return DigestOn(BestTarget(), data, bytes);
}

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_DIGEST_H_
