// Tests the properties of Muon's updates beside their accuracy.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iostream>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/reference/whole_reference.h"
#include "kernels/test_seed.h"
#include "kernels/whole_harness.h"
#include "kernels/whole_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

// Returns the eigenvalues of a symmetric matrix, by Jacobi's rotations.
std::vector<double> Eigenvalues(std::vector<double> matrix, size_t size) {
  const auto at = [&](size_t i, size_t j) -> double& {
    return matrix[i * size + j];
  };
  for (int sweep = 0; sweep < 12; ++sweep) {
    for (size_t p = 0; p < size; ++p) {
      for (size_t q = p + 1; q < size; ++q) {
        if (std::abs(at(p, q)) < 1e-15) continue;
        const double angle =
            0.5 * std::atan2(2 * at(p, q), at(q, q) - at(p, p));
        const double c = std::cos(angle);
        const double s = std::sin(angle);
        for (size_t k = 0; k < size; ++k) {
          const double old_p = at(k, p);
          at(k, p) = c * old_p - s * at(k, q);
          at(k, q) = s * old_p + c * at(k, q);
        }
        for (size_t k = 0; k < size; ++k) {
          const double old_p = at(p, k);
          at(p, k) = c * old_p - s * at(q, k);
          at(q, k) = s * old_p + c * at(q, k);
        }
      }
    }
  }
  std::vector<double> values;
  for (size_t k = 0; k < size; ++k) values.push_back(at(k, k));
  std::sort(values.begin(), values.end());
  return values;
}

// Returns the singular values, ascending.
std::vector<double> SingularValues(const std::vector<float>& matrix,
                                   size_t rows, size_t columns) {
  std::vector<double> gram(rows * rows);
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < rows; ++j) {
      for (size_t k = 0; k < columns; ++k) {
        gram[i * rows + j] += static_cast<double>(matrix[i * columns + k]) *
                              static_cast<double>(matrix[j * columns + k]);
      }
    }
  }
  std::vector<double> values = Eigenvalues(std::move(gram), rows);
  for (double& value : values) value = std::sqrt(std::max(0.0, value));
  return values;
}

// The coefficients bring singular values above 1/256 or so of the norm to
// [0.68, 1.13] in five steps.
TEST(MuonTest, UpdatesAreOrthogonalAsTorchs) {
  Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kMuon);
  hyperparams[muon::kLr] = 1;
  hyperparams[muon::kWeightDecay] = 0;
  std::mt19937 random(TestSeed());
  for (const Shape& shape : {Shape{48, 128}, Shape{64, 65}, Shape{128, 300}}) {
    const size_t rows = static_cast<size_t>(shape[0]);
    const size_t columns = static_cast<size_t>(shape[1]);
    const std::vector<float> zeros(rows * columns);
    const std::vector<float> gradient = RandomMaster(zeros.size(), &random);
    WholeReference<float> torch(OptimizerKind::kMuon, shape, zeros);
    KernelRun ours(OptimizerKind::kMuon, shape, zeros);
    torch.Step(hyperparams, gradient);
    ours.Step(hyperparams, gradient);
    const auto of_torch = SingularValues(torch.parameter(), rows, columns);
    const auto of_ours = SingularValues(ours.master(), rows, columns);
    EXPECT_NEAR(of_ours.front(), of_torch.front(), 0.02);
    EXPECT_NEAR(of_ours.back(), of_torch.back(), 0.02);
    EXPECT_LT(of_ours.back(), 1.25);
    if (rows * 2 < columns) {
      EXPECT_GT(of_ours.front(), 0.6);
    }
    std::cout << of_ours.front() << " to " << of_ours.back() << ", torch "
              << of_torch.front() << " to " << of_torch.back() << std::endl;
  }
}

// Nothing here depends on the order of sums, so that bfloat16's rounding is the
// same to the bit.
TEST(MuonTest, WithoutStepsTheUpdateIsWhatTorchNormalises) {
  std::mt19937 random(TestSeed());
  for (double eps : {1e-7, 1e3}) {
    Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kMuon);
    hyperparams[muon::kLr] = 1;
    hyperparams[muon::kWeightDecay] = 0;
    hyperparams[muon::kEps] = eps;
    hyperparams[muon::kNsSteps] = 0;
    const Shape shape = {40, 33};
    const std::vector<float> zeros(NumelOf(shape));
    const std::vector<float> gradient = RandomMaster(zeros.size(), &random);
    WholeReference<float> torch(OptimizerKind::kMuon, shape, zeros);
    KernelRun ours(OptimizerKind::kMuon, shape, zeros);
    torch.Step(hyperparams, gradient);
    ours.Step(hyperparams, gradient);
    size_t different = 0;
    for (size_t i = 0; i < zeros.size(); ++i) {
      different += ours.master()[i] != torch.parameter()[i];
    }
    // The gradient may lie on the edge between two bfloat16, and torch's
    // weight between two floats.
    EXPECT_LE(different, zeros.size() / 100);
  }
}

TEST(MuonTest, StepsEndHoweverManyAreAsked) {
  Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kMuon);
  hyperparams[muon::kNsSteps] = 1e300;
  KernelRun run(OptimizerKind::kMuon, {2, 3}, {1, 2, 3, 4, 5, 6});
  run.Step(hyperparams, {1, 0, 0, 0, 1, 0});
  EXPECT_TRUE(std::isfinite(run.master()[0]));
}

TEST(MuonTest, TakesMatricesOnly) {
  const WholeKernel& kernel = *FindWholeKernel(OptimizerKind::kMuon);
  EXPECT_TRUE(kernel.check_shape({3, 5}).ok());
  const absl::Status status = kernel.check_shape({2, 3, 5});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "Muon only supports 2D parameters whereas we found a parameter "
            "with size: torch.Size([2, 3, 5])");
}

}  // namespace
}  // namespace optstate::kernels
