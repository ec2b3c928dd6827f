// Tests that the values of another device come to their place as a kernel
// brings its own there: also when the process is killed on the way, at every
// instruction (undo_harness.h).

#include "kernels/write_back.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/rules.h"
#include "kernels/cpu/targets.h"
#include "kernels/single_step.h"
#include "kernels/test_keys.h"
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

// Returns keys of every format that is kept and every number of states.
std::vector<UpdateKernelKey> Keys() {
  std::vector<UpdateKernelKey> keys = {
      kLargestKey,
      {OptimizerKind::kSgd, 0, DType::kFloat32, DType::kFloat32},
      {OptimizerKind::kRmsprop, rmsprop::kCentered, DType::kBFloat16,
       DType::kFloat16},
      {OptimizerKind::kLion, 0, DType::kFloat32, DType::kBFloat16,
       StateFormat::kBFloat16},
      {OptimizerKind::kAdamW, 0, DType::kBFloat16, DType::kBFloat16,
       StateFormat::kBFloat16, MasterFormat::kSplit}};
  keys.insert(keys.end(), std::begin(kXorKeys), std::end(kXorKeys));
  return keys;
}

std::vector<UpdateKernelKey> BlockKeys() {
  UpdateKernelKey key = {OptimizerKind::kAdamW, adam::kAmsgrad,
                         DType::kBFloat16, DType::kBFloat16,
                         StateFormat::kDynamic8};
  UpdateKernelKey split = key;
  split.master = MasterFormat::kSplit;
  UpdateKernelKey own = key;
  own.parameter = DType::kFloat32;
  return {key, split, own};
}

// A job's view of arrays: a float32 parameter is its own master.
TileView ViewOf(Arrays* arrays, const UpdateKernelKey& key, size_t numel) {
  TileView view = arrays->View(key, numel);
  if (key.parameter == DType::kFloat32) view.parameter = view.master;
  return view;
}

class WriteBackTest : public testing::TestWithParam<UpdateKernelKey> {
 protected:
  const UpdateKernel& kernel() const {
    return *cpu::FindKernel(GetParam(), cpu::SupportedTargets().back());
  }
  // Fills the arrays with old values and `after_` with the new ones.
  void Begin(size_t numel) {
    Fill(shared_.get(), GetParam(), &random_);
    after_ = std::make_unique<Arrays>(shared_->arrays);
    GoOn(after_.get(), numel, 0, nullptr);
  }
  // Updates elements from `begin` on with the CPU's kernel.
  void GoOn(Arrays* arrays, size_t numel, size_t begin, UndoSlot* undo) {
    const void* const gradient = shared_->gradient;
    TileView view = ViewOf(arrays, GetParam(), numel);
    view.gradients = {&gradient, 1};
    view.begin = begin;
    view.undo = undo;
    kernel().apply(Factors(GetParam()), view);
  }
  void Write(size_t numel, size_t begin, UndoSlot* undo) {
    TileView to = ViewOf(&shared_->arrays, GetParam(), numel);
    to.begin = begin;
    to.undo = undo;
    WriteBack(GetParam(), ViewOf(after_.get(), GetParam(), numel), to);
  }

  SharedMemory<Shared> shared_;
  std::unique_ptr<Arrays> after_;
  std::mt19937 random_{TestSeed()};
};

TEST_P(WriteBackTest, BringsEveryArray) {
  for (const size_t numel : {1, 63, 64, 65, 256, 257, 319}) {
    for (const bool with_undo : {false, true}) {
      SCOPED_TRACE(absl::StrCat(numel, " undo ", with_undo));
      Begin(numel);
      const Arrays before = shared_->arrays;
      EXPECT_FALSE(before == *after_);
      Write(numel, /*begin=*/0, with_undo ? &shared_->slot : nullptr);
      EXPECT_TRUE(shared_->arrays == *after_);
    }
  }
}

TEST_P(WriteBackTest, LeavesTheElementsBeforeItsBegin) {
  Begin(kNumelMax);
  constexpr size_t kBegin = kQuantizedBlockElements;
  const Arrays before = shared_->arrays;
  shared_->slot.progress.store(UndoProgress(kBegin));
  Write(kNumelMax, kBegin, &shared_->slot);
  EXPECT_FALSE(shared_->arrays == *after_);
  // The first elements are all that is missing.
  Write(kBegin, /*begin=*/0, nullptr);
  EXPECT_TRUE(shared_->arrays == *after_);
  EXPECT_FALSE(before == *after_);
}

TEST_P(WriteBackTest, GoesOnFromEveryInstruction) {
  const UpdateKernelKey& key = GetParam();
  const bool has_blocks = key.state == StateFormat::kDynamic8;
  const size_t numel =
      has_blocks ? kQuantizedBlockElements + 5 : 2 * kUndoVectorElements + 3;
  Begin(numel);
  shared_->slot.progress.store(UndoProgress(0));
  size_t updated = 0;
  auto last = std::make_unique<Copy>(*shared_.get());
  bool is_first = true;
  size_t states = 0;
  SKIP_IF_UNTRACEABLE(
      StepThrough([&] { Write(numel, /*begin=*/0, &shared_->slot); },
                  [&](int64_t /*instruction*/) {
                    auto now = std::make_unique<Copy>(*shared_.get());
                    // Most instructions store nothing here.
                    if (!is_first && *now == *last) return true;
                    is_first = false;
                    ++states;
                    last = std::move(now);
                    Copy copy(*shared_.get());
                    const auto rolled_back =
                        RollBack(ViewOf(&copy.arrays, key, numel), kernel(),
                                 key.state, key.master, &copy.slot);
                    if (!rolled_back.ok() || *rolled_back < updated)
                      return false;
                    updated = *rolled_back;
                    GoOn(&copy.arrays, numel, updated, &copy.slot);
                    return copy.arrays == *after_;
                  }));
  EXPECT_GT(states, 10u);
  EXPECT_TRUE(shared_->arrays == *after_);
  // Progress has gone along.
  EXPECT_EQ(updated, has_blocks ? numel : 2 * kUndoVectorElements);
}

std::vector<UpdateKernelKey> AllTested() {
  std::vector<UpdateKernelKey> keys = Keys();
  for (const UpdateKernelKey& key : BlockKeys()) keys.push_back(key);
  return keys;
}

INSTANTIATE_TEST_SUITE_P(
    Keys, WriteBackTest, testing::ValuesIn(AllTested()), [](const auto& key) {
      return absl::StrCat(
          NameOf(Variant{key.param.optimizer, key.param.options}), key.index);
    });

}  // namespace
}  // namespace optstate::kernels
