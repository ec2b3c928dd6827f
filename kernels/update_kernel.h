#ifndef OPTSTATE_KERNELS_UPDATE_KERNEL_H_
#define OPTSTATE_KERNELS_UPDATE_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {

struct UndoSlot;  // undo.h

// One contiguous piece of one parameter within one tile: the unit that a kernel
// updates in one call. All arrays have `numel` elements, need only the
// alignment of their element, and do not overlap.
struct TileView {
  // The gradients are summed in float in this order before anything else; at
  // least one, each of the gradient dtype of the kernel.
  absl::Span<const void* const> gradients;
  // The parameter, of the parameter dtype of the kernel. It is only written,
  // unless it is the upper half of a split master; it is left alone when it is
  // its own master.
  void* parameter = nullptr;
  // The master, of float, or of uint16_t when it is split; the parameter itself
  // when that is of float32.
  void* master = nullptr;
  // The arrays are in the order of OptimizerInfo::state_arrays, of the kernel's
  // state format; null where the group's options bring none.
  void* state[kStateArraysMax] = {};
  // With kDynamic8: the largest absolute value of each block.
  float* scale[kStateArraysMax] = {};
  size_t numel = 0;
  // Elements before this one are left alone: a killed kernel had updated them.
  size_t begin = 0;
  // The position of element 0 in the job's flat space. With kDynamic8 element 0
  // begins a block.
  uint64_t flat_begin = 0;
  // The kernel keeps the old values of what it is overwriting here, so that
  // another process can go on where this one was killed; null: it keeps none.
  // If not null, the slot's `progress` is UndoProgress(begin), or what RollBack
  // left.
  UndoSlot* undo = nullptr;
};

// The values that the inner loop needs of the hyperparameters, the step count
// and the clip coefficient, computed once a step in double and rounded once.
struct UpdateFactors {
  // Common to all rules: the sum of gradients is multiplied by the factor
  // (negative: maximize), then cut to [-limit, limit] (infinity: not cut).
  float gradient_factor = 1;
  float gradient_limit = 0;
  uint32_t random_seed = 0;  // kBFloat16
  // The rule that fills the slots defines what each means.
  float slot[13] = {};
};

// The input of prepare, for one parameter and step.
struct UpdateInput {
  Hyperparams hyperparams;
  int64_t step_count = 1;  // the parameter's own, after this step (>= 1)
  // The number of an optimizer that keeps one per parameter
  // (OptimizerInfo::scalar), as UpdateKernel::advance made it for this step.
  double scalar = 0;
  // Multiplies the sum of the raw gradients: clip coefficient / scale.
  double gradient_factor = 1;
  // Unscaled gradients are cut to [-limit, limit]; 0: they are not cut.
  double gradient_limit = 0;
  uint64_t step = 0;  // of the job; random bits depend on it
};

// The kernel of one combination of optimizer, options and dtypes. Obtained from
// FindUpdateKernel; lives as long as the process.
//
// Threads: all functions are pure and may run concurrently on disjoint views.
// Bits: apply() gives equal bits on every instruction set; it never uses a
// fused multiply-add, and its divisions and square roots are IEEE. Each element
// (kDynamic8: each block) depends on itself alone, so cutting a view in two
// changes nothing. NaN is always written as 0x7FC00000 (bfloat16 0x7FC0,
// float16 0x7E00).
struct UpdateKernel {
  UpdateFactors (*prepare)(const UpdateInput& input) = nullptr;
  // Returns the parameter's number after step `step_count`; null: it has none.
  double (*advance)(const Hyperparams& hyperparams, int64_t step_count,
                    double scalar) = nullptr;
  void (*apply)(const UpdateFactors& factors, const TileView& view) = nullptr;
  // The undo of this kernel is a xor, but for single vectors (UndoPhase of
  // undo.h).
  bool keeps_xor = false;
};

struct UpdateKernelKey {
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  uint32_t options = 0;  // bits of OptimizerInfo::options
  DType gradient = DType::kFloat32;
  DType parameter = DType::kFloat32;
  StateFormat state = StateFormat::kFloat32;
  // kSplit occurs with bfloat16 parameters alone. The other formats share a
  // kernel: the loops do not ask what is kept beside a float32 parameter.
  MasterFormat master = MasterFormat::kFloat32;
};

// Returns UNIMPLEMENTED, naming the key, when no kernel has it. Never allocates
// on success; picks the best instruction set of this CPU at the first call.
absl::StatusOr<const UpdateKernel*> FindUpdateKernel(
    const UpdateKernelKey& key);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_UPDATE_KERNEL_H_
