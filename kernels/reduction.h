#ifndef OPTSTATE_KERNELS_REDUCTION_H_
#define OPTSTATE_KERNELS_REDUCTION_H_

#include <cstdint>

namespace optstate::kernels {

enum class Reduction : uint8_t {
  kSumOfSquares,
  kSumOfAbsolutes,   // the L1 norm
  kLargestAbsolute,  // the Linf norm; NaN wins
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_REDUCTION_H_
