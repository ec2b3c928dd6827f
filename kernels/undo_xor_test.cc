// Updates that keep a xor, killed before it is finished and while it is:
// undo_harness.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cpu/rules.h"
#include "kernels/single_step.h"
#include "kernels/undo.h"
#include "kernels/undo_arrays.h"
#include "kernels/undo_harness.h"
#include "kernels/update_kernel.h"

namespace optstate::kernels {
namespace {

// A process that finishes the pairs is killed too, at every instruction. There
// are two pairs, because the second one's xor may not come where the first
// one's is.
TEST_P(UndoTest, XorIsFinishedFromEveryInstruction) {
  if (!HasPairs(GetParam())) GTEST_SKIP() << "vectors are too long for pairs";
  const size_t numel = 4 * LanesOf(GetParam()) + 1;
  for (const UpdateKernelKey& key : kXorKeys) {
    SKIP_IF_UNTRACEABLE(StepThroughUpdate(key, numel));
    const Arrays after = shared_->arrays;
    const UpdateKernel& kernel = *cpu::FindKernel(key, GetParam());
    const UpdateFactors factors = Factors(key);
    const void* const gradient = shared_->gradient;
    bool has_phase[4] = {};
    const std::vector<std::unique_ptr<Copy>> xors = std::move(xors_);
    for (const auto& left : xors) {
      // One copy of each phase is enough: its stores are those of all.
      bool& has = has_phase[static_cast<int>(PhaseOf(left->slot))];
      if (has) continue;
      has = true;
      left->CopyTo(shared_.get());
      const auto apply = [&](Arrays* arrays, UndoSlot* slot) {
        TileView view = arrays->View(key, numel);
        view.gradients = absl::MakeConstSpan(&gradient, 1);
        view.undo = slot;
        view.begin = *RollBack(view, kernel, key.state, key.master, view.undo);
        kernel.apply(factors, view);
      };
      auto last = std::make_unique<Copy>(*left);
      SKIP_IF_UNTRACEABLE(
          StepThrough([&] { apply(&shared_->arrays, &shared_->slot); },
                      [&](int64_t /*instruction*/) {
                        auto now = std::make_unique<Copy>(*shared_.get());
                        if (*now == *last) return true;
                        last = std::make_unique<Copy>(*now);
                        apply(&now->arrays, &now->slot);
                        return now->arrays == after;
                      }));
      EXPECT_EQ(shared_->arrays, after);
    }
    EXPECT_TRUE(has_phase[1] && has_phase[2] && has_phase[3]);
    if (HasFailure()) return;
  }
}

// A pair with a NaN is done again, vector by vector, with undo of old values:
// between pairs that keep a xor, and as the first one.
TEST_P(UndoTest, PairWithNanGoesOnFromEveryInstruction) {
  if (!HasPairs(GetParam())) GTEST_SKIP() << "vectors are too long for pairs";
  const size_t lanes = LanesOf(GetParam());
  for (const size_t nan : {lanes, 2 * lanes}) {
    SCOPED_TRACE(nan);
    nans_ = {nan};
    SKIP_IF_UNTRACEABLE(StepThroughUpdate(kXorKeys[0], 6 * lanes));
    EXPECT_FALSE(xors_.empty());
    if (HasFailure()) return;
  }
}

// The result is not to be relied on, but no rubbish either: of each element the
// old or the new state, updated with what is there now, or all that it was to
// become.
TEST_P(UndoTest, XorIsFinishedWithGradientsThatHaveChanged) {
  if (!HasPairs(GetParam())) GTEST_SKIP() << "vectors are too long for pairs";
  const size_t numel = 2 * LanesOf(GetParam());
  const UpdateKernelKey key = kXorKeys[0];
  SKIP_IF_UNTRACEABLE(StepThroughUpdate(key, numel));
  const UpdateKernel& kernel = *cpu::FindKernel(key, GetParam());
  const UpdateFactors factors = Factors(key);
  const std::vector<float> gradients(numel, -7.0f);
  const void* const gradient = gradients.data();
  const auto apply = [&](Arrays* arrays, UndoSlot* slot) {
    TileView view = arrays->View(key, numel);
    view.gradients = absl::MakeConstSpan(&gradient, 1);
    view.undo = slot;
    kernel.apply(factors, view);
  };
  ASSERT_FALSE(xors_.empty());
  const Arrays& after = shared_->arrays;
  // The first one was left before any new value.
  Arrays of_old = xors_.front()->arrays;
  Arrays of_new = of_old;
  std::copy_n(after.array[1], numel, of_new.array[1]);
  apply(&of_old, nullptr);
  apply(&of_new, nullptr);
  for (const auto& left : xors_) {
    apply(&left->arrays, &left->slot);
    for (size_t i = 0; i < numel; ++i) {
      const auto is_as_in = [&](const Arrays& arrays) {
        const auto& array = left->arrays.array;
        return array[0][i] == arrays.array[0][i] &&
               array[1][i] == arrays.array[1][i] &&
               array[2][i] == arrays.array[2][i];
      };
      EXPECT_TRUE(is_as_in(after) || is_as_in(of_old) || is_as_in(of_new)) << i;
    }
  }
}

}  // namespace
}  // namespace optstate::kernels
