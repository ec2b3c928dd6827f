#include "kernels/cpu/matmul.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/guarded_array.h"
#include "kernels/cpu/targets.h"
#include "kernels/test_seed.h"

namespace optstate::kernels::cpu {
namespace {

using Matrix = std::vector<float>;

struct FreeDeleter {
  void operator()(float* array) const { std::free(array); }
};

std::unique_ptr<float, FreeDeleter> Workspace(size_t rows) {
  const size_t bytes = MatMulWorkspaceElements(rows) * sizeof(float);
  return std::unique_ptr<float, FreeDeleter>(
      static_cast<float*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
}

Matrix RandomMatrix(size_t rows, size_t columns, std::mt19937* random) {
  // The values spread over many magnitudes, so that the order shows in the last
  // bits.
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-8, 2);
  Matrix matrix(rows * columns);
  for (float& x : matrix) x = normal(*random) * std::exp(exponent(*random));
  return matrix;
}

Matrix Transposed(const Matrix& matrix, size_t rows, size_t columns) {
  Matrix result(matrix.size());
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) {
      result[j * rows + i] = matrix[i * columns + j];
    }
  }
  return result;
}

// Rounds to the nearest, ties to even; any NaN becomes the one of kernels.
uint32_t BFloat16Bits(float value) {
  if (std::isnan(value)) return 0x7FC00000;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
}

// Computes the definition in matmul.h, word for word.
std::vector<uint32_t> Defined(const MatMul& matmul) {
  std::vector<uint32_t> result;
  for (size_t i = 0; i < matmul.rows; ++i) {
    for (size_t j = 0; j < matmul.columns; ++j) {
      volatile float sum = 0;
      for (size_t k = 0; k < matmul.depth; ++k) {
        const float b = matmul.b_is_transposed
                            ? matmul.b[j * matmul.depth + k]
                            : matmul.b[k * matmul.columns + j];
        const volatile float product = matmul.a[i * matmul.depth + k] * b;
        sum = sum + product;
      }
      const volatile float scaled = matmul.alpha * sum;
      float value = scaled;
      if (matmul.addend != nullptr) {
        const volatile float added =
            matmul.beta * matmul.addend[i * matmul.columns + j];
        value = scaled + added;
      }
      result.push_back(BFloat16Bits(value));
    }
  }
  return result;
}

std::vector<uint32_t> Computed(Target target, MatMul matmul) {
  const auto workspace = Workspace(matmul.rows);
  GuardedArray<float> result(Matrix(matmul.rows * matmul.columns));
  matmul.result = result.data();
  matmul.workspace = workspace.get();
  MultiplyOn(target, matmul);
  EXPECT_TRUE(result.GuardsAreIntact());
  std::vector<uint32_t> bits;
  for (float x : result.elements()) {
    bits.push_back(std::bit_cast<uint32_t>(x));
  }
  return bits;
}

class MatMulTest : public testing::TestWithParam<Target> {};

TEST_P(MatMulTest, HasTheDefinedBits) {
  std::mt19937 random(TestSeed());
  for (size_t rows : {1, 2, 3, 4, 5, 12, 33, 61, 130}) {
    for (size_t columns : {1, 15, 31, 32, 33, 290}) {
      for (size_t depth : {1, 7, 127, 128, 129, 300}) {
        const Matrix a = RandomMatrix(rows, depth, &random);
        const Matrix b = RandomMatrix(depth, columns, &random);
        const Matrix b_transposed = Transposed(b, depth, columns);
        const Matrix addend = RandomMatrix(rows, columns, &random);
        MatMul matmul;
        matmul.rows = rows;
        matmul.columns = columns;
        matmul.depth = depth;
        matmul.a = a.data();
        matmul.b = b.data();
        const auto expected = Defined(matmul);
        ASSERT_EQ(Computed(GetParam(), matmul), expected);
        matmul.b = b_transposed.data();
        matmul.b_is_transposed = true;
        ASSERT_EQ(Computed(GetParam(), matmul), expected);
        matmul.alpha = 2.0315f;
        matmul.beta = -4.775f;
        matmul.addend = addend.data();
        ASSERT_EQ(Computed(GetParam(), matmul), Defined(matmul))
            << rows << " x " << depth << " x " << columns;
      }
    }
  }
}

TEST_P(MatMulTest, SymmetricProductsAreTheSame) {
  std::mt19937 random(TestSeed());
  for (size_t rows : {1, 4, 31, 32, 33, 64, 100, 290}) {
    const size_t depth = 137;
    const Matrix a = RandomMatrix(rows, depth, &random);
    Matrix gram(rows * rows);
    const auto workspace = Workspace(rows);
    MatMul matmul;
    matmul.rows = matmul.columns = rows;
    matmul.depth = depth;
    matmul.a = matmul.b = a.data();
    matmul.b_is_transposed = true;
    matmul.is_symmetric = true;
    ASSERT_EQ(Computed(GetParam(), matmul), Defined(matmul)) << rows;
    matmul.result = gram.data();
    matmul.workspace = workspace.get();
    MultiplyOn(GetParam(), matmul);

    MatMul square;
    square.rows = square.columns = square.depth = rows;
    square.a = square.b = square.addend = gram.data();
    square.is_symmetric = true;
    square.alpha = 2.0315f;
    square.beta = -4.775f;
    ASSERT_EQ(Computed(GetParam(), square), Defined(square)) << rows;
  }
}

TEST_P(MatMulTest, SpecialValuesStayInTheirRowAndColumn) {
  constexpr size_t kSize = 37;
  std::mt19937 random(TestSeed());
  for (float special : {std::numeric_limits<float>::quiet_NaN(),
                        std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::max(),
                        std::numeric_limits<float>::denorm_min()}) {
    Matrix a = RandomMatrix(kSize, kSize, &random);
    Matrix b = RandomMatrix(kSize, kSize, &random);
    a[random() % a.size()] = special;
    b[random() % b.size()] = -special;
    MatMul matmul;
    matmul.rows = matmul.columns = matmul.depth = kSize;
    matmul.a = a.data();
    matmul.b = b.data();
    ASSERT_EQ(Computed(GetParam(), matmul), Defined(matmul)) << special;
  }
}

TEST_P(MatMulTest, NoDepthLeavesTheAddend) {
  const Matrix addend = {1, 2, 3};
  MatMul matmul;
  matmul.rows = 1;
  matmul.columns = 3;
  matmul.addend = addend.data();
  matmul.beta = 2;
  EXPECT_EQ(Computed(GetParam(), matmul), Defined(matmul));
}

INSTANTIATE_TEST_SUITE_P(Targets, MatMulTest,
                         testing::ValuesIn(SupportedTargets().begin(),
                                           SupportedTargets().end()),
                         [](const testing::TestParamInfo<Target>& target) {
                           return std::string(TargetName(target.param));
                         });

}  // namespace
}  // namespace optstate::kernels::cpu
