#ifndef OPTSTATE_KERNELS_CPU_MATMUL_H_
#define OPTSTATE_KERNELS_CPU_MATMUL_H_

#include <cstddef>

#include "kernels/cpu/targets.h"

namespace optstate::kernels::cpu {

// Computes result = alpha * (a @ b) + beta * addend, rounded to bfloat16.
// Matrices are row-major and hold floats; `result` overlaps no other.
struct MatMul {
  size_t rows = 0;     // of a and the result
  size_t columns = 0;  // of b and the result
  size_t depth = 0;
  const float* a = nullptr;
  const float* b = nullptr;
  // b is given as its transpose: columns x depth.
  bool b_is_transposed = false;
  // The caller knows that the product equals its transpose, bit by bit (a @
  // a^T, or a @ a of a symmetric a): half of the product is copied.
  bool is_symmetric = false;
  float alpha = 1;
  float beta = 0;
  const float* addend = nullptr;  // null: none
  float* result = nullptr;
  float* workspace = nullptr;  // MatMulWorkspaceElements(rows), aligned to 64
};

size_t MatMulWorkspaceElements(size_t rows);

// Multiplies on one of SupportedTargets(), with equal bits on each: every
// element of the product is one float to which the products of its row and
// column are added from the first to the last, each rounded before.
//
// No BLAS is used, because none promises that: BLAS kernels differ between CPUs
// in how they cut the depth and in whether they fuse.
void MultiplyOn(Target target, const MatMul& matmul);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_MATMUL_H_
