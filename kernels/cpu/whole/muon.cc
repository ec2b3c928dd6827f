// The kernel of torch.optim.Muon.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/whole_rules.h"
#include "kernels/factors.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/whole/muon.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/whole-inl.h"
#include "kernels/rules/muon-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_WHOLE_MUON_CC_
#define OPTSTATE_KERNELS_CPU_WHOLE_MUON_CC_
namespace optstate::kernels::cpu {

inline absl::Status CheckMuonShape(absl::Span<const int64_t> shape) {
  if (shape.size() == 2) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("Muon only supports 2D parameters whereas we found a "
                   "parameter with size: torch.Size([",
                   absl::StrJoin(shape, ", "), "])"));
}

// Newton-Schulz works on the parameter or its transpose, whichever has no more
// rows than columns.
struct MuonSize {
  size_t rows;
  size_t columns;
  bool is_transposed;
};

inline MuonSize MuonSizeOf(absl::Span<const int64_t> shape) {
  const auto rows = static_cast<size_t>(shape[0]);
  const auto columns = static_cast<size_t>(shape[1]);
  return {std::min(rows, columns), std::max(rows, columns), rows > columns};
}

// Each array begins a cache line.
inline size_t WholeLines(size_t elements) {
  constexpr size_t kLineElements = 16;
  return (elements + kLineElements - 1) / kLineElements * kLineElements;
}

// The contents of the workspace; a second x is where the new master goes.
struct MuonWorkspace {
  MuonWorkspace(const MuonSize& size, float* begin)
      : x(begin),
        gram(x + WholeLines(size.rows * size.columns)),
        gram_update(gram + WholeLines(size.rows * size.rows)),
        matmul(gram_update + WholeLines(size.rows * size.rows)) {}

  float* x;            // rows x columns
  float* gram;         // rows x rows
  float* gram_update;  // rows x rows
  float* matmul;
};

inline uint64_t MuonWorkspaceElements(absl::Span<const int64_t> shape) {
  const MuonSize size = MuonSizeOf(shape);
  return WholeLines(size.rows * size.columns) +
         2 * WholeLines(size.rows * size.rows) +
         MatMulWorkspaceElements(size.rows);
}

// Transposes in blocks, so that both matrices' lines stay in cache.
inline void Transpose(const float* from, size_t rows, size_t columns,
                      float* to) {
  constexpr size_t kBlock = 16;
  for (size_t i0 = 0; i0 < rows; i0 += kBlock) {
    const size_t i1 = std::min(i0 + kBlock, rows);
    for (size_t j0 = 0; j0 < columns; j0 += kBlock) {
      const size_t j1 = std::min(j0 + kBlock, columns);
      for (size_t j = j0; j < j1; ++j) {
        for (size_t i = i0; i < i1; ++i) {
          to[j * rows + i] = from[i * columns + j];
        }
      }
    }
  }
}

}  // namespace optstate::kernels::cpu
#endif  // OPTSTATE_KERNELS_CPU_WHOLE_MUON_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Computes the new momentum and, rounded to bfloat16, what is to be
// orthogonalised.
void UpdateMomentum(const Hyperparams& h, const WholeView& view,
                    float* update) {
  const MuonWeights weights = PrepareMuon(h);
  ForVectors<2, 2>(
      view.numel, {view.gradient, view.state[0]}, {view.new_state[0], update},
      [weights](auto d, const auto& in, const auto& out, size_t i) HWY_ATTR {
        auto buffer = hn::LoadU(d, in[1] + i);
        const auto ahead =
            MuonMomentum(d, weights, hn::LoadU(d, in[0] + i), buffer);
        hn::StoreU(buffer, d, out[0] + i);
        hn::StoreU(ahead, d, out[1] + i);
      });
}

void Normalize(double eps, size_t numel, float* x) {
  const float divisor = MuonDivisor(eps, SumOfSquares(x, numel));
  ForVectors<1, 1>(
      numel, {x}, {x},
      [divisor](auto d, const auto& in, const auto& out, size_t i) HWY_ATTR {
        hn::StoreU(MuonNormalized(d, hn::LoadU(d, in[0] + i), divisor), d,
                   out[0] + i);
      });
}

// Computes next = a * x + (b * gram + c * gram @ gram) @ x, gram = x @ x^T.
void NewtonSchulzStep(const Hyperparams& h, const MuonSize& size,
                      const MuonWorkspace& workspace, const float* x,
                      float* next) {
  MultiplyOn(HWY_TARGET, {.rows = size.rows,
                          .columns = size.rows,
                          .depth = size.columns,
                          .a = x,
                          .b = x,
                          .b_is_transposed = true,
                          .is_symmetric = true,
                          .result = workspace.gram,
                          .workspace = workspace.matmul});
  MultiplyOn(HWY_TARGET, {.rows = size.rows,
                          .columns = size.rows,
                          .depth = size.rows,
                          .a = workspace.gram,
                          .b = workspace.gram,
                          .is_symmetric = true,
                          .alpha = RoundToFloat(h[muon::kC]),
                          .beta = RoundToFloat(h[muon::kB]),
                          .addend = workspace.gram,
                          .result = workspace.gram_update,
                          .workspace = workspace.matmul});
  MultiplyOn(HWY_TARGET, {.rows = size.rows,
                          .columns = size.columns,
                          .depth = size.rows,
                          .a = workspace.gram_update,
                          .b = x,
                          .beta = RoundToFloat(h[muon::kA]),
                          .addend = x,
                          .result = next,
                          .workspace = workspace.matmul});
}

void ComputeMuon(const UpdateInput& input, const WholeView& view) {
  const Hyperparams& h = input.hyperparams;
  if (view.numel == 0) return;
  const MuonSize size = MuonSizeOf(view.shape);
  const MuonWorkspace workspace(size, view.workspace);
  float* x = workspace.x;
  float* other = view.new_master;
  if (size.is_transposed) {
    UpdateMomentum(h, view, other);
    Transpose(other, size.columns, size.rows, x);
  } else {
    UpdateMomentum(h, view, x);
  }
  Normalize(h[muon::kEps], view.numel, x);
  const int steps = NewtonSchulzSteps(h[muon::kNsSteps]);
  for (int step = 0; step < steps; ++step) {
    NewtonSchulzStep(h, size, workspace, x, other);
    std::swap(x, other);
  }
  if (size.is_transposed) {
    Transpose(x, size.rows, size.columns, other);
    std::swap(x, other);
  }
  const double lr = h[muon::kLr];
  Descend(view.master, x, RoundToFloat(lr * h[muon::kWeightDecay]),
          RoundToFloat(lr * AdjustedRatio(h[muon::kAdjustLr], view.shape)),
          view.numel, view.new_master);
}

const WholeKernel& MuonOfTarget() {
  static constexpr WholeKernel kKernel = {
      .workspace_elements = &MuonWorkspaceElements,
      .check_shape = &CheckMuonShape,
      .compute = &ComputeMuon,
  };
  return kKernel;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/target_table.h"
OPTSTATE_EXPORT_WHOLE_RULE(MuonKernel, MuonOfTarget)
#endif  // HWY_ONCE
