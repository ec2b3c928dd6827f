// Tests that the fences around an undo slot are needed, and suffice.
//
// Killed at any instruction, a kernel is resumed where it was: undo_test checks
// that, but with the order of stores that this compiler happened to choose,
// which is the right one without the fences too. Here every order is tried that
// the language allows. A child runs kernels whose fences are instructions
// (undo_fence.h), one instruction at a time, and what it stores between two of
// them is stored again in any order and interrupted anywhere; whatever that
// leaves, a kernel that goes on from there must come to the right end. And each
// kind of fence is left out once: then some order must be one that no kernel
// comes to the right end from, or the fence would be good for nothing.
//
// One thing is not tried: that a compiler stores something that is nowhere in
// the program, as it may into memory that it will overwrite before a fence.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/marked_kernels.h"
#include "kernels/cpu/targets.h"
#include "kernels/single_step.h"
#include "kernels/store_orders.h"
#include "kernels/store_trace.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "kernels/undo.h"
#include "kernels/undo_arrays.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

using cpu::FindMarkedKernel;
using cpu::SupportedTargets;
using cpu::Target;
using cpu::TargetName;

// The size is a block and the beginning of another.
constexpr size_t kNumelMax = kQuantizedBlockElements + 5;
using Arrays = UndoArrays<kNumelMax>;

// The memory that a process leaves. The slot is first, with its atomic words.
struct Shared {
  UndoSlot slot;
  Arrays arrays;
};
constexpr size_t kWords = offsetof(UndoSlot, old) / sizeof(uint64_t);
constexpr size_t kProgressWord =
    offsetof(UndoSlot, progress) / sizeof(uint64_t);

UpdateFactors Factors(const UpdateKernelKey& key) {
  UpdateInput input;
  input.hyperparams = SettingsOf({key.optimizer, key.options})[1].hyperparams;
  input.step_count = 9;
  return FactorsAt(*FindMarkedKernel(key, SupportedTargets().back()),
                   key.optimizer, input);
}

class FenceTest : public testing::TestWithParam<Target> {
 protected:
  ~FenceTest() override { std::cerr << tried_ << " orders tried\n"; }

  size_t lanes() const { return LanesOf(GetParam()); }

  void Fill(const UpdateKernelKey& key, size_t gradient_count) {
    std::uniform_real_distribution<float> values(0.5f, 1.5f);
    std::memset(static_cast<void*>(&shared_->slot), 0xA5, sizeof(UndoSlot));
    shared_->slot.progress.store(0);
    shared_->slot.saved.store(0);
    shared_->arrays.Fill(&random_);
    Encode(key);
    std::vector<float> gradient(kNumelMax);
    for (float& x : gradient) x = 2 + values(random_);
    for (size_t i : nans_)
      gradient[i] = std::numeric_limits<float>::quiet_NaN();
    cpu::CastFromFloatOn(SupportedTargets().back(), key.gradient,
                         gradient.data(), gradient_, kNumelMax);
    gradients_.assign(gradient_count, gradient_);
  }

  // Encodes the state; any bits are a state.
  void Encode(const UpdateKernelKey& key) {
    if (IsSplit(key)) shared_->arrays.Split();
    if (key.state == StateFormat::kFloat32) return;
    for (int k = 0; k < kStateArraysMax; ++k) {
      float* const array = shared_->arrays.array[1 + k];
      const std::vector<float> values(array, array + kNumelMax);
      for (size_t i = 0; i < kNumelMax; ++i) {
        if (key.state == StateFormat::kDynamic8) {
          reinterpret_cast<uint8_t*>(array)[i] =
              static_cast<uint8_t>(random_());
        } else {
          reinterpret_cast<uint16_t*>(array)[i] =
              static_cast<uint16_t>(std::bit_cast<uint32_t>(values[i]) >> 16);
        }
      }
    }
  }

  // Goes on as a later process does; false when the slot is taken for broken.
  bool GoOn(const UpdateKernelKey& key, size_t numel, Shared* shared) const {
    const UpdateKernel& kernel = *FindMarkedKernel(key, GetParam());
    TileView view = shared->arrays.View(key, numel);
    const absl::StatusOr<size_t> begin =
        RollBack(view, kernel, key.state, key.master, &shared->slot);
    if (!begin.ok()) return false;
    view.gradients = gradients_;
    view.begin = *begin;
    view.undo = &shared->slot;
    kernel.apply(Factors(key), view);
    return true;
  }

  // Tries the orders of what is in shared_, which may have been left in the
  // middle; `work` then goes on from there. Adds the fences that it needs to
  // needed_.
  void TryOrders(const std::function<void()>& work,
                 const std::function<bool(Shared*)>& go_on,
                 StoreTrace* its_trace = nullptr) {
    StoreTrace trace =
        TraceStores(absl::MakeSpan(reinterpret_cast<std::byte*>(shared_.get()),
                                   sizeof(Shared)),
                    kWords, work);
    SKIP_IF_UNTRACEABLE(trace.instructions);
    const Arrays after = shared_->arrays;
    StoreOrders orders;
    orders.random = &random_;
    auto left = std::make_unique<Shared>();
    orders.recovers = [&](absl::Span<const std::byte> memory) {
      std::memcpy(static_cast<void*>(left.get()), memory.data(),
                  sizeof(Shared));
      return go_on(left.get()) && left->arrays == after;
    };
    const FenceNames names = NamesOf(trace, kProgressWord);
    needed_.merge(NeededFences(trace, names, orders, &tried_));
    if (its_trace != nullptr) *its_trace = std::move(trace);
  }

  void TryUpdate(const UpdateKernelKey& key, size_t numel,
                 size_t gradient_count = 1, StoreTrace* trace = nullptr) {
    Fill(key, gradient_count);
    const UpdateFactors factors = Factors(key);
    const UpdateKernel& kernel = *FindMarkedKernel(key, GetParam());
    TileView view = shared_->arrays.View(key, numel);
    view.gradients = gradients_;
    view.undo = &shared_->slot;
    TryOrders([&] { kernel.apply(factors, view); },
              [&](Shared* left) { return GoOn(key, numel, left); }, trace);
  }

  // Tries to go on from the memory that `trace` left in the middle of each
  // segment.
  void TryGoingOn(const UpdateKernelKey& key, size_t numel,
                  const StoreTrace& trace) {
    std::vector<std::byte> memory = trace.initial;
    for (const auto& segment : trace.segments) {
      for (size_t i = 0; i < segment.size(); ++i) {
        if (i == segment.size() / 2) {
          std::memcpy(static_cast<void*>(shared_.get()), memory.data(),
                      sizeof(Shared));
          TryOrders([&] { GoOn(key, numel, shared_.get()); },
                    [&](Shared* left) { return GoOn(key, numel, left); });
          if (IsSkipped() || HasFailure()) return;
        }
        std::memcpy(memory.data() + segment[i].offset, &segment[i].value,
                    segment[i].bytes);
      }
    }
  }

  void TryAccumulate(DType dtype, DType sum_dtype, size_t numel,
                     size_t gradient_count) {
    Fill({.gradient = dtype}, gradient_count);
    if (sum_dtype == DType::kBFloat16) {
      const std::vector<float> sums(shared_->arrays.array[0],
                                    shared_->arrays.array[0] + kNumelMax);
      cpu::CastFromFloatOn(SupportedTargets().back(), sum_dtype, sums.data(),
                           shared_->arrays.array[0], kNumelMax);
    }
    const auto accumulate = [=, this](Shared* shared) {
      cpu::AccumulateOn(GetParam(), dtype, gradients_, /*first=*/false,
                        sum_dtype, shared->arrays.array[0], numel,
                        &shared->slot);
    };
    TryOrders(
        [&] { accumulate(shared_.get()); },
        [&](Shared* left) {
          if (!RollBackSum(left->slot, sum_dtype, left->arrays.array[0], numel)
                   .ok()) {
            return false;
          }
          // The store is the one that begins a new run (worker_undo.h).
          left->slot.saved.store(0);
          accumulate(left);
          return true;
        });
  }

  SharedMemory<Shared> shared_;
  std::mt19937 random_{TestSeed()};
  std::vector<size_t> nans_;  // of the gradient
  std::set<std::string> needed_;

 private:
  alignas(64) uint32_t gradient_[kNumelMax] = {};
  std::vector<const void*> gradients_;
  size_t tried_ = 0;
};

using Names = std::set<std::string>;

const Names kOfOldValues = {"before progress of old values",
                            "behind progress of old values"};
const Names kOfEnd = {"before progress of the end",
                      "behind progress of the end"};
const Names kOfXor = {
    "before progress of state 0", "behind progress of state 0",
    "before progress of state 1", "behind progress of state 1",
    "before progress of masters", "behind progress of masters"};

Names operator+(Names all, const Names& others) {
  all.insert(others.begin(), others.end());
  return all;
}

constexpr UpdateKernelKey kXorKeys[] = {
    {OptimizerKind::kAdamW, 0, DType::kFloat32, DType::kFloat32},
    {OptimizerKind::kAdamW, 0, DType::kBFloat16, DType::kBFloat16},
    {OptimizerKind::kAdamW, 0, DType::kBFloat16, DType::kBFloat16,
     StateFormat::kFloat32, MasterFormat::kSplit}};

// The view has three pairs of vectors, another one and a tail.
TEST_P(FenceTest, OfPairsThatKeepXor) {
  if (!HasPairs(GetParam())) GTEST_SKIP() << "vectors are too long for pairs";
  for (const UpdateKernelKey& key : kXorKeys) {
    for (const size_t gradient_count : {1, 2}) {
      TryUpdate(key, 7 * lanes() + lanes() / 2, gradient_count);
      if (IsSkipped() || HasFailure()) return;
    }
  }
  EXPECT_EQ(needed_, kOfXor + kOfOldValues);
}

TEST_P(FenceTest, OfPairsWithNan) {
  if (!HasPairs(GetParam())) GTEST_SKIP() << "vectors are too long for pairs";
  nans_ = {lanes(), 5 * lanes()};
  TryUpdate(kXorKeys[0], 6 * lanes());
  if (IsSkipped()) return;
  EXPECT_EQ(needed_, kOfXor + kOfOldValues);
}

TEST_P(FenceTest, OfFinishedXor) {
  if (!HasPairs(GetParam())) GTEST_SKIP() << "vectors are too long for pairs";
  const size_t numel = 4 * lanes() + 1;
  for (const UpdateKernelKey& key : kXorKeys) {
    StoreTrace trace;
    TryUpdate(key, numel, 1, &trace);
    if (IsSkipped() || HasFailure()) return;
    TryGoingOn(key, numel, trace);
    if (IsSkipped() || HasFailure()) return;
  }
  EXPECT_EQ(needed_, kOfXor + kOfOldValues + kOfEnd);
}

TEST_P(FenceTest, OfVectorsThatKeepOldValues) {
  const size_t numel = std::min(5 * lanes() + 1, kNumelMax);
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kLion}) {
    const uint32_t options = kind == OptimizerKind::kAdamW ? adam::kAmsgrad : 0;
    for (const StateFormat state :
         {StateFormat::kFloat32, StateFormat::kBFloat16}) {
      for (const UpdateKernelKey& key : kXorKeys) {
        const UpdateKernelKey with = {kind,          options, key.gradient,
                                      key.parameter, state,   key.master};
        StoreTrace trace;
        TryUpdate(with, numel, 1, &trace);
        if (IsSkipped() || HasFailure()) return;
        EXPECT_EQ(needed_, kOfOldValues);
        needed_.clear();
        if (!IsSplit(key)) continue;  // the others' RollBack does less
        TryGoingOn(with, numel, trace);
        if (IsSkipped() || HasFailure()) return;
        // Behind that of RollBack nothing comes but old values once more, which
        // are what was there.
        EXPECT_EQ(needed_,
                  kOfOldValues + Names({"before progress of the end"}));
        needed_.clear();
      }
    }
  }
}

TEST_P(FenceTest, OfBlocks) {
  for (UpdateKernelKey key : kXorKeys) {
    key.state = StateFormat::kDynamic8;
    TryUpdate(key, kNumelMax);
    if (IsSkipped() || HasFailure()) return;
  }
  EXPECT_EQ(needed_, kOfOldValues + kOfEnd);
}

TEST_P(FenceTest, OfSums) {
  for (const DType sum_dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const size_t gradient_count : {1, 2}) {
      TryAccumulate(DType::kBFloat16, sum_dtype, 4 * lanes() + 1,
                    gradient_count);
      if (IsSkipped() || HasFailure()) return;
    }
  }
  EXPECT_EQ(needed_, Names({"before saved", "behind saved"}));
}

INSTANTIATE_TEST_SUITE_P(Targets, FenceTest,
                         testing::ValuesIn(SupportedTargets().begin(),
                                           SupportedTargets().end()),
                         [](const testing::TestParamInfo<Target>& target) {
                           return std::string(TargetName(target.param));
                         });

}  // namespace
}  // namespace optstate::kernels
