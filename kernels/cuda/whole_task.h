#ifndef OPTSTATE_KERNELS_CUDA_WHOLE_TASK_H_
#define OPTSTATE_KERNELS_CUDA_WHOLE_TASK_H_

#include <algorithm>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/ops/host_device.h"
#include "kernels/ops/scalar_ops.h"
// These includes come after scalar_ops.h.
#include "kernels/rules/adafactor-inl.h"
#include "kernels/rules/lamb-inl.h"
#include "kernels/rules/muon-inl.h"
#include "kernels/rules/whole-inl.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {

struct MuonFactors {
  MuonWeights weights;
  double eps;
  float a;  // ns_coefficients
  float b;
  float c;
  uint32_t steps;  // of Newton-Schulz
  // Newton-Schulz works on the transpose, which has no more rows than columns.
  bool is_transposed;
  DescentFactors descent;
};

// Factors of a parameter that a step knows before it sees the gradient: only
// the members of its optimizer have a meaning.
struct WholeFactors {
  LambFactors lamb;
  double lr;  // LAMB's
  AdafactorStep adafactor;
  LerpWeight element_weight;  // Adafactor's, of parameters without columns
  MuonFactors muon;
};

// The update of one parameter that needs all of it (WholeKernel): one task of a
// launch. All addresses are the device's. New values replace the old ones.
struct WholeTask {
  // As WholeView::gradient has it. The updates replace it, and wait here for
  // their norm.
  float* gradient;
  float* master;
  float* state[kStateArraysMax];
  uint64_t numel;  // not 0
  // Adafactor: the size of one matrix, which the last two dimensions are, and
  // the rows and the columns of all matrices together; 0: there is none. Muon:
  // the size of the matrix that Newton-Schulz works on.
  uint64_t rows;
  uint64_t columns;
  uint64_t all_rows;
  uint64_t all_columns;
  // Blocks tell each other these: MeansOf() means of row variances, ScratchOf()
  // other values, and one descent (Muon: `step` is what the update is divided
  // by). Their previous contents do not matter.
  double* means;
  float* scratch;
  DescentFactors* descent;
  WholeFactors factors;
};

// Returns whether the optimizer has kernels of whole parameters on a device.
inline bool HasWholeBlocks(OptimizerKind kind) {
  return kind == OptimizerKind::kLamb || kind == OptimizerKind::kAdafactor ||
         kind == OptimizerKind::kMuon;
}

// Returns the number of matrices of a parameter that is not empty, which have a
// mean each; 0: the optimizer takes none.
inline uint64_t MeansOf(OptimizerKind kind, absl::Span<const int64_t> shape) {
  if (kind != OptimizerKind::kAdafactor || shape.size() < 2) return 0;
  return NumelOf(shape.first(shape.size() - 2));
}

// Returns the elements of WholeTask::scratch: of Muon a second matrix, and two
// with a column for each row.
inline uint64_t ScratchOf(OptimizerKind kind, absl::Span<const int64_t> shape) {
  if (kind != OptimizerKind::kMuon || shape.size() != 2) return 0;
  const auto rows = static_cast<uint64_t>(std::min(shape[0], shape[1]));
  return NumelOf(shape) + 2 * rows * rows;
}

// Returns whether some parameters of the optimizer have means or scratch.
inline bool NeedsScratch(OptimizerKind kind) {
  return kind != OptimizerKind::kLamb;
}

inline MuonFactors MuonFactorsOf(const Hyperparams& h,
                                 absl::Span<const int64_t> shape) {
  const double lr = h[muon::kLr];
  MuonFactors factors = {};
  factors.weights = PrepareMuon(h);
  factors.eps = h[muon::kEps];
  factors.a = RoundToFloat(h[muon::kA]);
  factors.b = RoundToFloat(h[muon::kB]);
  factors.c = RoundToFloat(h[muon::kC]);
  factors.steps = static_cast<uint32_t>(NewtonSchulzSteps(h[muon::kNsSteps]));
  factors.is_transposed = shape[0] > shape[1];
  factors.descent = {
      RoundToFloat(lr * h[muon::kWeightDecay]),
      RoundToFloat(lr * AdjustedRatio(h[muon::kAdjustLr], shape))};
  return factors;
}

// Returns the task of a parameter, without its addresses. The optimizer
// HasWholeBlocks(), and takes the shape.
inline WholeTask WholeTaskOf(OptimizerKind kind, const UpdateInput& input,
                             absl::Span<const int64_t> shape) {
  WholeTask task = {};
  task.numel = NumelOf(shape);
  if (kind == OptimizerKind::kLamb) {
    task.factors.lamb = PrepareLamb(input);
    task.factors.lr = input.hyperparams[adam::kLr];
    return task;
  }
  if (kind == OptimizerKind::kMuon) {
    task.factors.muon = MuonFactorsOf(input.hyperparams, shape);
    task.rows = static_cast<uint64_t>(std::min(shape[0], shape[1]));
    task.columns = static_cast<uint64_t>(std::max(shape[0], shape[1]));
    return task;
  }
  task.factors.adafactor = PrepareAdafactor(input);
  task.factors.element_weight = MakeLerpWeight(task.factors.adafactor.weight);
  const uint64_t matrices = MeansOf(kind, shape);
  if (matrices == 0) return task;
  task.rows = static_cast<uint64_t>(shape[shape.size() - 2]);
  task.columns = static_cast<uint64_t>(shape.back());
  task.all_rows = matrices * task.rows;
  task.all_columns = matrices * task.columns;
  return task;
}

// The matrices of Muon. Those of a round are exchanged for the next one.
struct MuonMatrices {
  float* x;            // rows x columns
  float* next;         // "
  float* gram;         // rows x rows
  float* gram_update;  // "
};

OPTSTATE_HOST_DEVICE inline MuonMatrices MuonMatricesOf(const WholeTask& task,
                                                        uint32_t round) {
  // The gradient is replaced element by element, which a transpose cannot be.
  const bool begins_in_scratch = task.factors.muon.is_transposed;
  const bool is_in_scratch = begins_in_scratch != (round % 2 == 1);
  float* const grams = task.scratch + task.numel;
  return {is_in_scratch ? task.scratch : task.gradient,
          is_in_scratch ? task.gradient : task.scratch, grams,
          grams + task.rows * task.rows};
}

// Returns where element i of the parameter is in Muon's matrices.
OPTSTATE_HOST_DEVICE inline uint64_t MuonPlace(const WholeTask& task,
                                               uint64_t i) {
  if (!task.factors.muon.is_transposed) return i;
  const uint64_t row = i / task.rows;
  const uint64_t column = i - row * task.rows;
  return column * task.columns + row;
}

// Returns the rounds of products that the launch of some tasks takes: those of
// the one that has most.
inline uint32_t RoundsOf(absl::Span<const WholeTask> tasks) {
  uint32_t rounds = 0;
  for (const WholeTask& task : tasks) {
    rounds = std::max(rounds, task.factors.muon.steps);
  }
  return rounds;
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_WHOLE_TASK_H_
