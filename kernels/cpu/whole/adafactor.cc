// The kernel of torch.optim.Adafactor.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/whole_rules.h"
#include "kernels/reduction.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/whole/adafactor.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/whole-inl.h"
#include "kernels/ops/ops-inl.h"
#include "kernels/rules/adafactor-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_WHOLE_ADAFACTOR_CC_
#define OPTSTATE_KERNELS_CPU_WHOLE_ADAFACTOR_CC_
namespace optstate::kernels::cpu {

// A parameter of two dimensions or more is a batch of matrices, its last two.
inline bool IsFactored(absl::Span<const int64_t> shape) {
  return shape.size() > 1;
}
inline size_t Rows(absl::Span<const int64_t> shape) {
  return static_cast<size_t>(shape[shape.size() - 2]);
}
inline size_t Columns(absl::Span<const int64_t> shape) {
  return static_cast<size_t>(shape.back());
}

// Returns the size of the workspace: each column's sum of squares, in double.
inline uint64_t AdafactorWorkspaceElements(absl::Span<const int64_t> shape) {
  return IsFactored(shape) ? Columns(shape) * sizeof(double) / sizeof(float)
                           : 0;
}

// Keeps the state where there is nothing to average.
inline void KeepState(const WholeView& view) {
  const OptimizerInfo& info = InfoOf(OptimizerKind::kAdafactor);
  for (int k = 0; k < kStateArraysMax; ++k) {
    const size_t elements = StateElements(info, k, view.shape);
    std::copy_n(view.state[k], elements, view.new_state[k]);
  }
}

}  // namespace optstate::kernels::cpu
#endif  // OPTSTATE_KERNELS_CPU_WHOLE_ADAFACTOR_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Adds sums[j] += row[j]^2, exact but for the sum's rounding.
inline void AddSquares(const float* row, size_t columns, double* sums) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  size_t j = 0;
  for (; j + hn::Lanes(d) <= columns; j += hn::Lanes(d)) {
    const auto element = hn::PromoteTo(d, hn::LoadU(df, row + j));
    hn::StoreU(hn::Add(hn::LoadU(d, sums + j), ops::Product(element, element)),
               d, sums + j);
  }
  for (; j < columns; ++j) {
    const double element = row[j];
    sums[j] += element * element;  // exact, so that fusing changes nothing
  }
}

// Updates the variances of one matrix; the rows' squares are added in Reduce's
// order, the columns' from the first row to the last.
void UpdateFactoredVariances(const AdafactorStep& step, const float* gradient,
                             size_t rows, size_t columns, const float* row_var,
                             const float* col_var, float* workspace,
                             float* new_row_var, float* new_col_var) {
  auto* sums = reinterpret_cast<double*>(workspace);
  std::uninitialized_fill_n(sums, columns, 0.0);
  for (size_t i = 0; i < rows; ++i) {
    const float* row = gradient + i * columns;
    const double mean =
        SumOfSquares(row, columns) / static_cast<double>(columns);
    new_row_var[i] = NextVariance(row_var[i], mean, step.weight);
    AddSquares(row, columns, sums);
  }
  for (size_t j = 0; j < columns; ++j) {
    new_col_var[j] = NextVariance(
        col_var[j], sums[j] / static_cast<double>(rows), step.weight);
  }
}

// Computes the gradient divided by the root of row_var * col_var /
// mean(row_var).
void NormalizeFactored(const AdafactorStep& step, const float* gradient,
                       size_t rows, size_t columns, const float* row_var,
                       const float* col_var, float* update) {
  // The variances are not negative: the sum of absolutes is their sum.
  const void* array = row_var;
  const double sum =
      ReduceOn(HWY_TARGET, Reduction::kSumOfAbsolutes, DType::kFloat32,
               absl::MakeConstSpan(&array, 1), rows);
  const double mean = AtLeast(sum / static_cast<double>(rows), step.mean_min);
  const float variance_min = step.variance_min;
  for (size_t i = 0; i < rows; ++i) {
    const float row = Rounded(row_var[i] / mean);
    ForVectors<2, 1>(
        columns, {gradient + i * columns, col_var}, {update + i * columns},
        [row, variance_min](auto d, const auto& in, const auto& out, size_t j)
            HWY_ATTR {
              const auto variance =
                  ops::Product(hn::Set(d, row), hn::LoadU(d, in[1] + j));
              hn::StoreU(Normalized(d, hn::LoadU(d, in[0] + j), variance,
                                    variance_min),
                         d, out[0] + j);
            });
  }
}

void UpdateFactored(const AdafactorStep& step, const WholeView& view) {
  const size_t rows = Rows(view.shape);
  const size_t columns = Columns(view.shape);
  for (size_t batch = 0; batch < view.numel / (rows * columns); ++batch) {
    const float* gradient = view.gradient + batch * rows * columns;
    float* row_var = view.new_state[0] + batch * rows;
    float* col_var = view.new_state[1] + batch * columns;
    UpdateFactoredVariances(
        step, gradient, rows, columns, view.state[0] + batch * rows,
        view.state[1] + batch * columns, view.workspace, row_var, col_var);
    NormalizeFactored(step, gradient, rows, columns, row_var, col_var,
                      view.new_master + batch * rows * columns);
  }
}

void UpdateVector(const AdafactorStep& step, const WholeView& view) {
  const LerpWeight weight = MakeLerpWeight(step.weight);
  const float variance_min = step.variance_min;
  ForVectors<2, 2>(
      view.numel, {view.gradient, view.state[2]},
      {view.new_state[2], view.new_master},
      [weight, variance_min](auto d, const auto& in, const auto& out,
                             size_t i) HWY_ATTR {
        const auto grad = hn::LoadU(d, in[0] + i);
        const auto variance =
            NextElementVariance(d, hn::LoadU(d, in[1] + i), grad, weight);
        hn::StoreU(variance, d, out[0] + i);
        hn::StoreU(Normalized(d, grad, variance, variance_min), d, out[1] + i);
      });
}

void ComputeAdafactor(const UpdateInput& input, const WholeView& view) {
  if (view.numel == 0) return KeepState(view);
  const AdafactorStep step = PrepareAdafactor(input);
  // The update waits in new_master for its norm.
  if (IsFactored(view.shape)) {
    UpdateFactored(step, view);
  } else {
    UpdateVector(step, view);
  }
  const DescentFactors descent =
      AdafactorDescent(step, SumOfSquares(view.master, view.numel),
                       SumOfSquares(view.new_master, view.numel), view.numel);
  Descend(view.master, view.new_master, descent.decay, descent.step, view.numel,
          view.new_master);
}

const WholeKernel& AdafactorOfTarget() {
  static constexpr WholeKernel kKernel = {
      .workspace_elements = &AdafactorWorkspaceElements,
      .check_shape = &AnyShape,
      .compute = &ComputeAdafactor,
  };
  return kKernel;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_WHOLE_RULE(AdafactorKernel, AdafactorOfTarget)
#endif  // HWY_ONCE
