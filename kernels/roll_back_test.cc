// Tests of RollBack and RollBackSum on a slot.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "kernels/cpu/rules.h"
#include "kernels/cpu/targets.h"
#include "kernels/single_step.h"
#include "kernels/test_seed.h"
#include "kernels/undo.h"
#include "kernels/undo_arrays.h"
#include "kernels/undo_harness.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

using cpu::SupportedTargets;

class RollBackTest : public testing::Test {
 protected:
  // Leaves memory as a kernel does that is killed when it has just written the
  // new values of elements [begin, begin + length), all of them -1.
  void KillAt(size_t begin, size_t position, size_t length) {
    Fill(shared_.get(), {}, &random_);
    before_ = shared_->arrays;
    for (int k = 0; k < Arrays::kArrays; ++k) {
      std::copy_n(before_.array[k] + begin, length,
                  shared_->slot.old[k] + position);
      std::fill_n(shared_->arrays.array[k] + begin, length, -1.0f);
    }
    shared_->slot.progress.store(UndoProgress(begin, position, length));
  }

  absl::StatusOr<size_t> RollBackOf(size_t numel,
                                    const UpdateKernelKey& key = kLargestKey) {
    return RollBack(shared_->arrays.View(key, numel),
                    *cpu::FindKernel(key, SupportedTargets().back()), key.state,
                    key.master, &shared_->slot);
  }

  SharedMemory<Shared> shared_;
  std::mt19937 random_{TestSeed()};
  Arrays before_;
};

// A process killed in RollBack leaves a view that rolls back just the same.
TEST_F(RollBackTest, RunsAgainFromEveryInstruction) {
  for (size_t length : {1, 8, 16, 64}) {
    KillAt(100, kUndoVectorElements, length);
    SKIP_IF_UNTRACEABLE(StepThrough(
        [&] { RollBackOf(kNumelMax).IgnoreError(); },
        [&](int64_t /*instruction*/) {
          Copy copy(*shared_.get());
          const absl::StatusOr<size_t> begin = RollBack(
              copy.arrays.View(kLargestKey, kNumelMax),
              *cpu::FindKernel(kLargestKey, SupportedTargets().back()),
              StateFormat::kFloat32, MasterFormat::kFloat32, &copy.slot);
          return begin.ok() && *begin == 100 && copy.arrays == before_ &&
                 copy.slot.progress.load() == UndoProgress(100);
        }));
    EXPECT_EQ(shared_->arrays, before_);
    EXPECT_EQ(shared_->slot.progress.load(), UndoProgress(100));
  }
}

TEST_F(RollBackTest, TouchesOnlyTheArraysInUse) {
  KillAt(5, 0, 7);
  Arrays expected = before_;
  std::fill_n(expected.array[2] + 5, 7, -1.0f);
  EXPECT_EQ(*RollBackOf(100, {OptimizerKind::kRmsprop, rmsprop::kCentered}),
            5u);
  EXPECT_EQ(shared_->arrays, expected);
}

TEST_F(RollBackTest, NothingInFlightIsNothingToDo) {
  for (size_t begin : {0, 1, 100}) {
    KillAt(begin, 0, 0);
    EXPECT_EQ(*RollBackOf(100), begin);
    EXPECT_EQ(shared_->arrays, before_);
    EXPECT_EQ(shared_->slot.progress.load(), UndoProgress(begin));
  }
}

TEST_F(RollBackTest, ImpossibleProgressIsDataLoss) {
  KillAt(90, 0, 10);
  const Arrays arrays = shared_->arrays;
  for (uint64_t progress :
       {UndoProgress(91, 0, 10), UndoProgress(101), ~uint64_t{0},
        UndoProgress(0, kUndoRingElements - 9, 10),
        UndoProgress(0, kUndoVectorElements, kUndoVectorElements + 1),
        // The kernel keeps no xor.
        UndoProgress(0, 0, 10, UndoPhase::kState0)}) {
    shared_->slot.progress.store(progress);
    EXPECT_EQ(RollBackOf(100).status().code(), absl::StatusCode::kDataLoss)
        << progress;
    EXPECT_EQ(shared_->arrays, arrays);
    EXPECT_EQ(shared_->slot.progress.load(), progress);
  }
}

TEST_F(RollBackTest, XorIsLeftToTheKernel) {
  KillAt(5, 0, 7);
  const Arrays arrays = shared_->arrays;
  const uint64_t progress = UndoProgress(5, 0, 7, UndoPhase::kState1);
  shared_->slot.progress.store(progress);
  EXPECT_EQ(*RollBackOf(100, kXorKeys[0]), 5u);
  EXPECT_EQ(shared_->arrays, arrays);
  EXPECT_EQ(shared_->slot.progress.load(), progress);
  shared_->slot.progress.store(UndoProgress(5, 0, 0, UndoPhase::kState1));
  EXPECT_EQ(RollBackOf(100, kXorKeys[0]).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(RollBackTest, BFloat16StateWasKeptAsFloats) {
  UpdateKernelKey key = kLargestKey;
  key.state = StateFormat::kBFloat16;
  KillAt(5, 0, 7);
  for (auto& old : shared_->slot.old) {
    for (float& x : old) x = 1.5f;
  }
  Arrays expected = shared_->arrays;
  std::fill_n(expected.array[0] + 5, 7, 1.5f);
  for (int k = 0; k < kStateArraysMax; ++k) {
    auto* halves = reinterpret_cast<uint16_t*>(expected.array[1 + k]);
    std::fill_n(halves + 5, 7, uint16_t{0x3FC0});
  }
  EXPECT_EQ(*RollBackOf(100, key), 5u);
  EXPECT_EQ(shared_->arrays, expected);
}

TEST_F(RollBackTest, ImpossibleProgressInBlocksIsDataLoss) {
  UpdateKernelKey key = kLargestKey;
  key.state = StateFormat::kDynamic8;
  KillAt(0, 0, 0);
  for (uint64_t progress :
       {UndoProgress(3, 0, 97), UndoProgress(0, 0, 99), UndoProgress(0, 1, 100),
        UndoProgress(101), UndoProgress(256, 0, 1), ~uint64_t{0}}) {
    shared_->slot.progress.store(progress);
    EXPECT_EQ(RollBackOf(100, key).status().code(), absl::StatusCode::kDataLoss)
        << progress;
    EXPECT_EQ(shared_->arrays, before_);
  }
  shared_->slot.progress.store(UndoProgress(0, 0, 100));
  EXPECT_EQ(*RollBackOf(100, key), 0u);
}

class RollBackSumTest : public testing::Test {
 protected:
  RollBackSumTest() : sum_(kTileElements + 1, -1.0f) {
    std::fill_n(slot_->old_sum, kTileElements, 2.0f);
  }

  std::unique_ptr<UndoSlot> slot_ = std::make_unique<UndoSlot>();
  std::vector<float> sum_;
};

TEST_F(RollBackSumTest, TouchesOnlyWhatWasSaved) {
  for (size_t saved : {size_t{0}, size_t{7}, size_t{kTileElements}}) {
    std::vector<float> expected = sum_;
    std::fill_n(expected.begin(), saved, 2.0f);
    slot_->saved.store(saved);
    ASSERT_TRUE(
        RollBackSum(*slot_, DType::kFloat32, sum_.data(), kTileElements).ok());
    EXPECT_EQ(sum_, expected);
  }
}

TEST_F(RollBackSumTest, MoreSavedThanThereAreIsDataLoss) {
  const std::vector<float> sum = sum_;
  slot_->saved.store(101);
  EXPECT_EQ(RollBackSum(*slot_, DType::kFloat32, sum_.data(), 100).code(),
            absl::StatusCode::kDataLoss);
  // A length of more than a tile is not believed either, whatever the view
  // says.
  slot_->saved.store(kTileElements + 1);
  EXPECT_EQ(RollBackSum(*slot_, DType::kFloat32, sum_.data(), 2 * kTileElements)
                .code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(sum_, sum);
}

}  // namespace
}  // namespace optstate::kernels
