#ifndef OPTSTATE_KERNELS_UNDO_HARNESS_H_
#define OPTSTATE_KERNELS_UNDO_HARNESS_H_

// The harness of the tests of a process killed in a kernel, at every
// instruction.
//
// A child runs the kernel on shared memory, one instruction at a time. After
// each, the test takes a copy of that memory, rolls back what is in flight and
// goes on from there: the result must be that of an undisturbed kernel.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/targets.h"
#include "kernels/single_step.h"
#include "kernels/test_seed.h"
#include "kernels/undo.h"
#include "kernels/undo_arrays.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {

inline constexpr size_t kNumelMax = 320;
using Arrays = UndoArrays<kNumelMax>;
// The key with every state array, and a parameter that is not the master.
inline constexpr UpdateKernelKey kLargestKey = {
    OptimizerKind::kAdamW, adam::kAmsgrad, DType::kBFloat16, DType::kBFloat16};

// Keys whose kernels keep, of a pair of vectors, the xor alone.
inline constexpr UpdateKernelKey kXorKeys[] = {
    {OptimizerKind::kAdamW, 0, DType::kFloat32, DType::kFloat32},
    {OptimizerKind::kAdam, 0, DType::kBFloat16, DType::kBFloat16},
    {OptimizerKind::kAdamW, 0, DType::kBFloat16, DType::kBFloat16,
     StateFormat::kFloat32, MasterFormat::kSplit}};

inline UndoPhase PhaseOf(const UndoSlot& slot) {
  return InFlightOf(slot.progress.load()).phase;
}

// The memory that outlives the child.
struct Shared {
  UndoSlot slot;
  Arrays arrays;
  // The size is enough for every dtype. A sum of several gradients adds this
  // one again.
  uint32_t gradient[kNumelMax];
};

// The copy that a later process works on, so that the child can go on. It has
// the part of the slot that an update uses.
struct Copy {
  explicit Copy(const Shared& shared) : arrays(shared.arrays) {
    CopySlot(shared.slot, &slot);
  }
  Copy(const Copy& other) : arrays(other.arrays) {
    CopySlot(other.slot, &slot);
  }

  void CopyTo(Shared* shared) const {
    shared->arrays = arrays;
    CopySlot(slot, &shared->slot);
  }

  bool operator==(const Copy& other) const {
    return std::memcmp(&slot, &other.slot, offsetof(UndoSlot, old_sum)) == 0 &&
           arrays == other.arrays;
  }

  static void CopySlot(const UndoSlot& from, UndoSlot* to) {
    std::memcpy(static_cast<void*>(to), &from, offsetof(UndoSlot, old_sum));
  }

  UndoSlot slot;
  Arrays arrays;
};

// Sets values that every rule changes, in all arrays; garbage in the slot.
void Fill(Shared* shared, const UpdateKernelKey& key, std::mt19937* random);

// Returns factors with decay and, where there is one, momentum.
UpdateFactors Factors(const UpdateKernelKey& key);

class UndoTest : public testing::TestWithParam<cpu::Target> {
 protected:
  // Has the child update elements [begin, numel); those before are updated
  // already. Returns StepThrough's result.
  int64_t StepThroughUpdate(const UpdateKernelKey& key, size_t numel,
                            size_t begin = 0, size_t gradient_count = 1);

  int64_t StepThroughAccumulate(DType dtype, size_t numel,
                                size_t gradient_count = 1,
                                DType sum_dtype = DType::kFloat32);

  SharedMemory<Shared> shared_;
  std::mt19937 random_{TestSeed()};
  std::vector<size_t> nans_;  // of the gradient, for updates of float32 ones
  // The copies that the last update left wherever it had kept a xor.
  std::vector<std::unique_ptr<Copy>> xors_;
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_UNDO_HARNESS_H_
