// Updates and sums whose process is killed: undo_harness.h.

#include "kernels/undo.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/targets.h"
#include "kernels/single_step.h"
#include "kernels/test_keys.h"
#include "kernels/undo_arrays.h"
#include "kernels/undo_fence.h"
#include "kernels/undo_harness.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

using cpu::SupportedTargets;
using cpu::Target;
using cpu::TargetName;

// Returns 1, a vector and its neighbours, three vectors and a tail.
std::vector<size_t> SizesAround(size_t lanes) {
  return {1, std::max<size_t>(lanes, 2) - 1, lanes, lanes + 1,
          3 * lanes + lanes / 2};
}

// Returns every pair of dtypes where each has a kernel of its own, else two
// that differ; with two vectors, another and a tail.
std::vector<UpdateKernelKey> KeysOf(const Variant& variant) {
  const auto [kind, options] = variant;
  std::vector<UpdateKernelKey> keys;
  for (DType gradient : kAllDTypes) {
    for (DType parameter : kAllDTypes) {
      const bool has_fixed_dtypes = kind <= OptimizerKind::kAdamW;
      const bool is_of_two =
          parameter == DType::kBFloat16 && gradient != DType::kFloat16;
      if (!has_fixed_dtypes && !is_of_two) continue;
      keys.push_back({kind, options, gradient, parameter});
    }
  }
  keys.push_back({kind, options, DType::kFloat32, DType::kBFloat16,
                  StateFormat::kBFloat16});
  for (StateFormat state : {StateFormat::kFloat32, StateFormat::kBFloat16}) {
    keys.push_back({kind, options, DType::kBFloat16, DType::kBFloat16, state,
                    MasterFormat::kSplit});
  }
  return keys;
}

TEST_P(UndoTest, EveryUpdateGoesOnFromEveryInstruction) {
  const size_t numel = 3 * LanesOf(GetParam()) + 1;
  for (const Variant& variant : AllVariants()) {
    for (const UpdateKernelKey& key : KeysOf(variant)) {
      SCOPED_TRACE(absl::StrCat(NameOf(variant), " ", Name(key.gradient),
                                " to ", Name(key.parameter)));
      SKIP_IF_UNTRACEABLE(StepThroughUpdate(key, numel));
      if (HasFailure()) return;
    }
  }
}

TEST_P(UndoTest, UpdateOfSeveralGradientsGoesOnFromEveryInstruction) {
  const size_t numel = 2 * LanesOf(GetParam()) + 1;
  for (const UpdateKernelKey& key :
       {kLargestKey, UpdateKernelKey{OptimizerKind::kSgd, sgd::kHasMomentum}}) {
    SKIP_IF_UNTRACEABLE(
        StepThroughUpdate(key, numel, /*begin=*/0, /*gradient_count=*/2));
    if (HasFailure()) return;
  }
}

// The view has a block and the beginning of another, which has an undo of its
// own kind.
TEST_P(UndoTest, UpdateOfBlocksGoesOnFromEveryInstruction) {
  // Without SIMD a block takes tens of thousands of instructions.
  std::vector<Variant> variants = {{OptimizerKind::kLion, 0}};
  if (LanesOf(GetParam()) > 1) {
    variants = {{OptimizerKind::kAdamW, adam::kAmsgrad},
                {OptimizerKind::kRmsprop, rmsprop::kCentered},
                {OptimizerKind::kSgd, 0}};
  }
  for (const auto& [kind, options] : variants) {
    const UpdateKernelKey key = {kind, options, DType::kBFloat16,
                                 DType::kBFloat16, StateFormat::kDynamic8};
    SKIP_IF_UNTRACEABLE(StepThroughUpdate(key, kQuantizedBlockElements + 5));
    SKIP_IF_UNTRACEABLE(StepThroughUpdate(key, kQuantizedBlockElements + 5,
                                          kQuantizedBlockElements));
    if (HasFailure()) return;
  }
  UpdateKernelKey split = {OptimizerKind::kLion, 0, DType::kBFloat16,
                           DType::kBFloat16, StateFormat::kDynamic8};
  split.master = MasterFormat::kSplit;
  SKIP_IF_UNTRACEABLE(StepThroughUpdate(split, kQuantizedBlockElements + 5));
}

TEST_P(UndoTest, SumsOf16BitsAreRolledBackFromEveryInstruction) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const size_t numel : SizesAround(LanesOf(GetParam()))) {
      for (const size_t gradient_count : {1, 2}) {
        SCOPED_TRACE(numel);
        SKIP_IF_UNTRACEABLE(
            StepThroughAccumulate(dtype, numel, gradient_count, dtype));
        if (HasFailure()) return;
      }
    }
  }
}

// The sum has many vectors.
TEST_P(UndoTest, LongSumOfGradientsGoesOnFromEveryInstruction) {
  const UpdateKernelKey key = {OptimizerKind::kSgd, sgd::kHasMomentum};
  SKIP_IF_UNTRACEABLE(StepThroughUpdate(key, kNumelMax - 1, /*begin=*/3,
                                        /*gradient_count=*/2));
}

TEST_P(UndoTest, UpdateOfEverySizeGoesOnFromEveryInstruction) {
  std::vector<size_t> sizes = SizesAround(LanesOf(GetParam()));
  sizes.push_back(kNumelMax - 1);
  for (size_t numel : sizes) {
    SCOPED_TRACE(numel);
    SKIP_IF_UNTRACEABLE(StepThroughUpdate(kLargestKey, numel));
    if (HasFailure()) return;
  }
}

// The process that goes on is killed too, wherever the one before had been.
TEST_P(UndoTest, ResumedUpdateGoesOnFromEveryInstruction) {
  const size_t numel = 2 * LanesOf(GetParam()) + 2;
  for (size_t begin = 1; begin <= numel; ++begin) {
    SCOPED_TRACE(begin);
    SKIP_IF_UNTRACEABLE(StepThroughUpdate(kLargestKey, numel, begin));
    if (HasFailure()) return;
  }
}

TEST_P(UndoTest, AccumulateRollsBackFromEveryInstruction) {
  std::vector<size_t> sizes = SizesAround(LanesOf(GetParam()));
  sizes.push_back(kNumelMax - 1);
  for (DType dtype : kAllDTypes) {
    for (size_t numel : sizes) {
      SCOPED_TRACE(absl::StrCat(Name(dtype), " x ", numel));
      SKIP_IF_UNTRACEABLE(StepThroughAccumulate(dtype, numel));
      SKIP_IF_UNTRACEABLE(StepThroughAccumulate(dtype, numel, 2));
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, UndoTest,
                         testing::ValuesIn(SupportedTargets().begin(),
                                           SupportedTargets().end()),
                         [](const testing::TestParamInfo<Target>& target) {
                           return std::string(TargetName(target.param));
                         });

// The test is of the fence itself: without it a compiler leaves the first store
// out.
TEST(UndoFenceTest, KeepsStoresApart) {
  const SharedMemory<uint64_t> shared;
  uint64_t* const word = shared.get();
  *word = 0;
  bool has_one = false;
  SKIP_IF_UNTRACEABLE(StepThrough(
      [word] {
        *word = 1;
        Fence<UndoFence::kBeforeProgress>();
        *word = 2;
      },
      [&](int64_t /*instruction*/) {
        has_one |= *static_cast<volatile uint64_t*>(word) == 1;
        return true;
      }));
  EXPECT_TRUE(has_one);
  EXPECT_EQ(*word, 2u);
}

}  // namespace
}  // namespace optstate::kernels
