#ifndef OPTSTATE_TESTS_BENCHMARKS_ADDITIONS_H_
#define OPTSTATE_TESTS_BENCHMARKS_ADDITIONS_H_

#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

namespace optstate {

// The order in which memory is visited. It matters by a quarter.
enum class AdditionsOrder {
  kVectors,  // a vector of each array, as kernels/cpu/memory_roof.h and kernels
  kBlocks,   // 64 elements of each array
};

// Measures the limit of memory: makes the loads and stores of AdamW with
// float32 state, 1, 2, 4 or 8 gradients of `dtype` and a parameter of the same,
// and nothing but additions between them. Like kernels/cpu/memory_roof.h, which
// has one gradient and one order. Leaves master and state as they are; bits of
// a bfloat16 are added as an integer's, because converting them is the kernel's
// work.
void Additions(DType dtype, const kernels::TileView& view,
               AdditionsOrder order);

}  // namespace optstate

#endif  // OPTSTATE_TESTS_BENCHMARKS_ADDITIONS_H_
