#ifndef OPTSTATE_KERNELS_CUDA_WHOLE_TASK_H_
#define OPTSTATE_KERNELS_CUDA_WHOLE_TASK_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/ops/scalar_ops.h"
// These includes come after scalar_ops.h.
#include "kernels/rules/adafactor-inl.h"
#include "kernels/rules/lamb-inl.h"
#include "kernels/rules/whole-inl.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {

// What a step knows of a parameter before it sees the gradient: only the
// members of its optimizer have a meaning.
struct WholeFactors {
  LambFactors lamb;
  double lr;  // LAMB's
  AdafactorStep adafactor;
  LerpWeight element_weight;  // Adafactor's, of parameters without columns
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
  // The size of one matrix, which the last two dimensions are, and the rows and
  // the columns of all matrices together; 0: the parameter has none, or the
  // optimizer does not ask.
  uint64_t rows;
  uint64_t columns;
  uint64_t all_rows;
  uint64_t all_columns;
  // Blocks tell each other these: MeansOf() means of row variances, and one
  // descent. Their previous contents do not matter.
  double* means;
  DescentFactors* descent;
  WholeFactors factors;
};

// Returns whether the optimizer has kernels of whole parameters on a device.
inline bool HasWholeBlocks(OptimizerKind kind) {
  return kind == OptimizerKind::kLamb || kind == OptimizerKind::kAdafactor;
}

// Returns the number of matrices of a parameter that is not empty, which have a
// mean each; 0: the optimizer takes none.
inline uint64_t MeansOf(OptimizerKind kind, absl::Span<const int64_t> shape) {
  if (kind != OptimizerKind::kAdafactor || shape.size() < 2) return 0;
  return NumelOf(shape.first(shape.size() - 2));
}

// Returns the task of a parameter, without its addresses. The optimizer
// HasWholeBlocks().
inline WholeTask WholeTaskOf(OptimizerKind kind, const UpdateInput& input,
                             absl::Span<const int64_t> shape) {
  WholeTask task = {};
  task.numel = NumelOf(shape);
  if (kind == OptimizerKind::kLamb) {
    task.factors.lamb = PrepareLamb(input);
    task.factors.lr = input.hyperparams[adam::kLr];
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

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_WHOLE_TASK_H_
