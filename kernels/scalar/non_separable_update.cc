#include "kernels/scalar/non_separable_update.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "kernels/factors.h"
#include "kernels/ops/scalar_ops.h"
// These includes come after scalar_ops.h.
#include "kernels/ops/float16-inl.h"
#include "kernels/reduction.h"
#include "kernels/rules/adafactor-inl.h"
#include "kernels/rules/lamb-inl.h"
#include "kernels/rules/muon-inl.h"
#include "kernels/rules/whole-inl.h"
#include "kernels/scalar/tile_update.h"
#include "kernels/whole_shape.h"
#include "proto/types/dtype.h"

namespace optstate::kernels::scalar {
namespace {

constexpr ops::FloatTag kFloats;

double Reduced(Reduction reduction, const float* elements, size_t numel) {
  const void* array = elements;
  return ReduceElements(reduction, DType::kFloat32,
                        absl::MakeConstSpan(&array, 1), numel);
}

double SumOfSquares(const float* elements, size_t numel) {
  return Reduced(Reduction::kSumOfSquares, elements, numel);
}

// Replaces the updates in new_master.
void Descend(const WholeView& view, float decay, float step) {
  for (size_t i = 0; i < view.numel; ++i) {
    view.new_master[i] =
        Descended(kFloats, view.master[i], view.new_master[i], decay, step);
  }
}

void ComputeLamb(const UpdateInput& input, const WholeView& view) {
  const LambFactors factors = PrepareLamb(input);
  for (size_t i = 0; i < view.numel; ++i) {
    float exp_avg = view.state[0][i];
    float exp_avg_sq = view.state[1][i];
    view.new_master[i] = LambUpdate(kFloats, factors, view.gradient[i],
                                    view.master[i], exp_avg, exp_avg_sq);
    view.new_state[0][i] = exp_avg;
    view.new_state[1][i] = exp_avg_sq;
  }
  const DescentFactors descent = LambDescent(
      input.hyperparams[adam::kLr], SumOfSquares(view.master, view.numel),
      SumOfSquares(view.new_master, view.numel));
  Descend(view, descent.decay, descent.step);
}

// Normalises one matrix, whose variances it updates.
void UpdateMatrix(const AdafactorStep& step, size_t rows, size_t columns,
                  const float* gradient, const float* row_var,
                  const float* col_var, float* new_row_var, float* new_col_var,
                  float* update) {
  std::vector<double> sums(columns);
  for (size_t i = 0; i < rows; ++i) {
    const float* row = gradient + i * columns;
    const double mean =
        SumOfSquares(row, columns) / static_cast<double>(columns);
    new_row_var[i] = NextVariance(row_var[i], mean, step.weight);
    for (size_t j = 0; j < columns; ++j) {
      const double element = row[j];
      sums[j] = ops::Add(sums[j], ops::Product(element, element));
    }
  }
  for (size_t j = 0; j < columns; ++j) {
    new_col_var[j] = NextVariance(
        col_var[j], sums[j] / static_cast<double>(rows), step.weight);
  }
  const double sum = Reduced(Reduction::kSumOfAbsolutes, new_row_var, rows);
  const double mean = AtLeast(sum / static_cast<double>(rows), step.mean_min);
  for (size_t i = 0; i < rows; ++i) {
    const float row = Rounded(new_row_var[i] / mean);
    for (size_t j = 0; j < columns; ++j) {
      const float variance = ops::Product(row, new_col_var[j]);
      update[i * columns + j] = Normalized(kFloats, gradient[i * columns + j],
                                           variance, step.variance_min);
    }
  }
}

void ComputeAdafactor(const UpdateInput& input, const WholeView& view) {
  const AdafactorStep step = PrepareAdafactor(input);
  if (view.shape.size() > 1) {
    const auto rows = static_cast<size_t>(view.shape[view.shape.size() - 2]);
    const auto columns = static_cast<size_t>(view.shape.back());
    for (size_t k = 0; k < view.numel / (rows * columns); ++k) {
      UpdateMatrix(step, rows, columns, view.gradient + k * rows * columns,
                   view.state[0] + k * rows, view.state[1] + k * columns,
                   view.new_state[0] + k * rows,
                   view.new_state[1] + k * columns,
                   view.new_master + k * rows * columns);
    }
  } else {
    const LerpWeight weight = MakeLerpWeight(step.weight);
    for (size_t i = 0; i < view.numel; ++i) {
      const float variance = NextElementVariance(kFloats, view.state[2][i],
                                                 view.gradient[i], weight);
      view.new_state[2][i] = variance;
      view.new_master[i] =
          Normalized(kFloats, view.gradient[i], variance, step.variance_min);
    }
  }
  const DescentFactors descent =
      AdafactorDescent(step, SumOfSquares(view.master, view.numel),
                       SumOfSquares(view.new_master, view.numel), view.numel);
  Descend(view, descent.decay, descent.step);
}

}  // namespace

bool ComputeWhole(OptimizerKind kind, const UpdateInput& input,
                  const WholeView& view) {
  if (kind == OptimizerKind::kLamb) {
    ComputeLamb(input, view);
    return true;
  }
  if (kind == OptimizerKind::kAdafactor) {
    ComputeAdafactor(input, view);
    return true;
  }
  return false;
}

void ComputeMuonWithoutSteps(const UpdateInput& input, const WholeView& view) {
  const Hyperparams& h = input.hyperparams;
  const MuonWeights weights = PrepareMuon(h);
  for (size_t i = 0; i < view.numel; ++i) {
    float buffer = view.state[0][i];
    view.new_master[i] =
        MuonMomentum(kFloats, weights, view.gradient[i], buffer);
    view.new_state[0][i] = buffer;
  }
  const float divisor =
      MuonDivisor(h[muon::kEps], SumOfSquares(view.new_master, view.numel));
  for (size_t i = 0; i < view.numel; ++i) {
    view.new_master[i] = MuonNormalized(kFloats, view.new_master[i], divisor);
  }
  const double lr = h[muon::kLr];
  Descend(view, RoundToFloat(lr * h[muon::kWeightDecay]),
          RoundToFloat(lr * AdjustedRatio(h[muon::kAdjustLr], view.shape)));
}

}  // namespace optstate::kernels::scalar
