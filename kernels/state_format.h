#ifndef OPTSTATE_KERNELS_STATE_FORMAT_H_
#define OPTSTATE_KERNELS_STATE_FORMAT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {

// Conversions of state arrays of any format to and from float, for reading,
// saving and loading them, and for updates that are made in float. With
// kDynamic8 an array that is never negative has the unsigned map.

// Sets out[i] to the value of element i. `scale` (kDynamic8): the scale of
// element 0's block, which element 0 begins, and those of the blocks behind it.
void StateToFloat(StateFormat format, bool is_never_negative, const void* in,
                  const float* scale, float* out, size_t numel);

// Stores the nearest values that the format can hold, and the scales. bfloat16:
// ties to even, not stochastically, so that what StateToFloat gave comes back
// as it was.
void StateFromFloat(StateFormat format, bool is_never_negative, const float* in,
                    void* out, float* scale, size_t numel);

// The choice of random bits that new values are rounded with.
struct StateRandom {
  uint32_t seed = 0;  // UpdateFactors::random_seed
  int array = 0;
  uint64_t flat_begin = 0;  // of element 0 in the job's flat space
};

// Stores these values as an update kernel does: as StateFromFloat, but bfloat16
// is rounded stochastically. A NaN is 0x7FC00000.
void StateFromUpdate(StateFormat format, bool is_never_negative,
                     const StateRandom& random, const float* in, void* out,
                     float* scale, size_t numel);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_STATE_FORMAT_H_
