#ifndef OPTSTATE_KERNELS_UPDATE_KERNEL_H_
#define OPTSTATE_KERNELS_UPDATE_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/hyperparams.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer_kind.h"

namespace optstate {

// State arrays besides the master parameter; a rule names those that it has.
inline constexpr int kMaxStateArrays = 3;

struct UndoSlot;  // undo.h

// One contiguous piece of one parameter within one tile: what a kernel updates
// in one call. All pointers have `numel` elements, need only the alignment of
// their element, and do not overlap. `parameter` is write-only.
struct TileView {
  const void* gradient = nullptr;  // gradient dtype of the kernel
  void* parameter = nullptr;       // parameter dtype of the kernel
  float* master = nullptr;
  float* state[kMaxStateArrays] = {};  // in the order of state_array_names
  size_t numel = 0;
  // Elements before this one are left alone: a killed kernel had updated them.
  size_t begin = 0;
  // Where the kernel keeps the old values of what it is overwriting, so that
  // another process can go on where this one was killed; null: nowhere. Not
  // null: the slot's `progress` is UndoProgress(begin).
  UndoSlot* undo = nullptr;
};

// What the inner loop needs of the hyperparameters, the step count and the
// clip coefficient, computed once a step in double and rounded once. The rule
// that fills it defines what each slot means.
struct UpdateFactors {
  float slot[12] = {};
};

// One (optimizer, amsgrad, dtypes) combination. Obtained from FindUpdateKernel;
// lives as long as the process.
//
// Threads: both functions are pure and may run concurrently on disjoint views.
// Bits: apply() gives equal bits on every instruction set; it never uses a
// fused multiply-add, and its divisions and square roots are IEEE. Each element
// depends on that element alone, so cutting a view in two changes nothing. NaN
// is always written as 0x7FC00000 (bfloat16 0x7FC0, float16 0x7E00).
struct UpdateKernel {
  absl::Span<const absl::string_view> state_array_names;  // torch's names
  // `step_count` is the parameter's own count after this step (>= 1);
  // `gradient_factor` multiplies the raw gradient (clip coefficient / scale).
  UpdateFactors (*prepare)(const Hyperparams& hyperparams, int64_t step_count,
                           double gradient_factor) = nullptr;
  void (*apply)(const UpdateFactors& factors, const TileView& view) = nullptr;
};

struct UpdateKernelKey {
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  bool amsgrad = false;
  DType gradient = DType::kFloat32;
  DType parameter = DType::kFloat32;
};

// UNIMPLEMENTED, naming the key, when no kernel has it. Never allocates on
// success; picks the best instruction set of this CPU at the first call.
absl::StatusOr<const UpdateKernel*> FindUpdateKernel(
    const UpdateKernelKey& key);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_UPDATE_KERNEL_H_
