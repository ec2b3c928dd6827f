// Tests the fences of a worker's undo memory: as in kernels/fence_test, with a
// worker that accumulates, replaces and updates, and a recovery that finds what
// the worker left as step_recovery.cc does, but without its surroundings.

#include "server/scheduler/worker_undo.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>

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
#include "proto/types/optimizer.h"

namespace optstate::scheduler {
namespace {

// Makes two pairs of vectors and another one without SIMD, on every machine.
constexpr size_t kNumel = 5;
constexpr uint64_t kStep = 7;
constexpr uint64_t kMark = 40;
// The first two are updated, with the sum of their gradients.
constexpr uint64_t kUpdated = 2;
constexpr uint64_t kReplaced = 2;
constexpr uint64_t kRuns = 3;

struct Shared {
  alignas(64) std::atomic<uint64_t> stamps[kRuns];
  std::atomic<uint64_t> marks[kUpdated];
  WorkerUndo undo;
  kernels::UndoArrays<kNumel> arrays[kUpdated];
  float sum[kUpdated][kNumel];
  float replaced[kNumel];
  float redo[kNumel];
};
// The atomic words, and the others that are stored with them.
constexpr size_t kWords = (offsetof(Shared, undo) + offsetof(WorkerUndo, slot) +
                           offsetof(kernels::UndoSlot, old)) /
                          sizeof(uint64_t);
constexpr size_t kProgressWord =
    (offsetof(Shared, undo) + offsetof(WorkerUndo, slot)) / sizeof(uint64_t);

class WorkerUndoTest : public testing::Test {
 protected:
  WorkerUndoTest() {
    std::memset(static_cast<void*>(shared_.get()), 0, sizeof(Shared));
    std::uniform_real_distribution<float> values(0.5f, 1.5f);
    for (uint64_t run = 0; run < kUpdated; ++run) {
      shared_->arrays[run].Fill(&random_);
      for (float& x : shared_->sum[run]) x = values(random_);
    }
    for (float& x : shared_->replaced) x = values(random_);
    for (float& x : gradient_) x = values(random_);
    // The slot is of another step and its accumulation.
    shared_->undo.run = 1;
    shared_->undo.stamp = kMark - 1;
    shared_->undo.slot.progress.store(kernels::UndoProgress(kNumel - 1, 0, 1));
    shared_->undo.slot.saved.store(kNumel);
    kernels::UpdateInput input;
    input.hyperparams = kernels::SettingsOf({key_.optimizer, 0})[1].hyperparams;
    input.step_count = 9;
    factors_ = kernels::FactorsAt(kernel_, key_.optimizer, input);
  }

  void Accumulate(Shared* shared, uint64_t run) const {
    const void* const gradient = gradient_;
    kernels::cpu::AccumulateOn(target_, DType::kFloat32,
                               absl::MakeConstSpan(&gradient, 1),
                               /*first=*/false, DType::kFloat32,
                               shared->sum[run], kNumel, &shared->undo.slot);
  }

  void Update(Shared* shared, uint64_t run, size_t begin) const {
    const void* const gradient = shared->sum[run];
    kernels::TileView view = shared->arrays[run].View(key_, kNumel);
    view.gradients = absl::MakeConstSpan(&gradient, 1);
    view.begin = begin;
    view.undo = &shared->undo.slot;
    kernel_.apply(factors_, view);
  }

  static void PutInPlace(Shared* shared) {
    std::memcpy(shared->replaced, shared->redo, sizeof(shared->redo));
    shared->undo.End(&shared->stamps[kReplaced]);
  }

  // Does the unfinished part of a worker's step.
  void Work(Shared* shared) const {
    WorkerUndo& undo = shared->undo;
    for (uint64_t run = 0; run < kUpdated; ++run) {
      if (shared->marks[run].load() == kMark) continue;
      undo.Begin(UndoKind::kAccumulate, run, kMark);
      Accumulate(shared, run);
      undo.End(&shared->marks[run]);
    }
    if (shared->stamps[kReplaced].load() != kStep) {
      for (size_t i = 0; i < kNumel; ++i) {
        shared->redo[i] = shared->replaced[i] * 0.5f + 1;
      }
      undo.Begin(UndoKind::kReplace, kReplaced, kStep);
      PutInPlace(shared);
    }
    for (uint64_t run = 0; run < kUpdated; ++run) {
      if (shared->stamps[run].load() == kStep) continue;
      undo.Begin(UndoKind::kUpdate, run, kStep);
      Update(shared, run, 0);
      undo.End(&shared->stamps[run]);
    }
  }

  // Recovers what was in flight. Returns false when the slot is impossible.
  bool Recover(Shared* shared) const {
    WorkerUndo& undo = shared->undo;
    const auto kind = static_cast<UndoKind>(undo.kind.load());
    if (kind == UndoKind::kNone) return true;
    const bool accumulating = kind == UndoKind::kAccumulate;
    if (undo.run >= kRuns ||
        (undo.run == kReplaced) != (kind == UndoKind::kReplace)) {
      return false;
    }
    const auto* stamps = accumulating ? shared->marks : shared->stamps;
    if (stamps[undo.run].load() == undo.stamp) {
      undo.Clear();
      return true;
    }
    if (accumulating) {
      if (!kernels::RollBackSum(undo.slot, DType::kFloat32,
                                shared->sum[undo.run], kNumel)
               .ok()) {
        return false;
      }
      undo.Clear();
      return true;
    }
    if (undo.stamp != kStep) return false;
    if (kind == UndoKind::kReplace) {
      PutInPlace(shared);
      return true;
    }
    const absl::StatusOr<size_t> begin =
        kernels::RollBack(shared->arrays[undo.run].View(key_, kNumel), kernel_,
                          key_.state, key_.master, &undo.slot);
    if (!begin.ok()) return false;
    Update(shared, undo.run, *begin);
    undo.End(&shared->stamps[undo.run]);
    return true;
  }

  static bool HasSameResults(const Shared& a, const Shared& b) {
    return std::memcmp(a.arrays, b.arrays, sizeof(a.arrays)) == 0 &&
           std::memcmp(a.sum, b.sum, sizeof(a.sum)) == 0 &&
           std::memcmp(a.replaced, b.replaced, sizeof(a.replaced)) == 0;
  }

  const kernels::cpu::Target target_ = kernels::cpu::SupportedTargets().back();
  const kernels::UpdateKernelKey key_ = {};
  const kernels::UpdateKernel& kernel_ =
      *kernels::cpu::FindMarkedKernel(key_, target_);
  kernels::UpdateFactors factors_;
  float gradient_[kNumel];
  std::mt19937 random_{kernels::TestSeed()};
  const kernels::SharedMemory<Shared> shared_;
};

TEST_F(WorkerUndoTest, EveryFenceIsNeededAndTheyAreEnough) {
  const kernels::StoreTrace trace = kernels::TraceStores(
      absl::MakeSpan(reinterpret_cast<std::byte*>(shared_.get()),
                     sizeof(Shared)),
      kWords, [&] { Work(shared_.get()); });
  SKIP_IF_UNTRACEABLE(trace.instructions);
  kernels::StoreOrders orders;
  orders.random = &random_;
  auto left = std::make_unique<Shared>();
  orders.recovers = [&](absl::Span<const std::byte> memory) {
    std::memcpy(static_cast<void*>(left.get()), memory.data(), sizeof(Shared));
    if (!Recover(left.get())) return false;
    Work(left.get());
    return HasSameResults(*left, *shared_.get());
  };
  size_t tried = 0;
  const std::set<std::string> expected = {
      "before run", "before kind", "behind kind", "before stamp",
      "behind stamp",
      // These are the kernels' own fences.
      "before saved", "behind saved", "before progress of state 0",
      "behind progress of state 0", "before progress of state 1",
      "behind progress of state 1", "before progress of masters",
      "behind progress of masters", "before progress of old values",
      "behind progress of old values"};
  EXPECT_EQ(kernels::NeededFences(trace, kernels::NamesOf(trace, kProgressWord),
                                  orders, &tried),
            expected);
  EXPECT_GT(tried, 1000u);
}

}  // namespace
}  // namespace optstate::scheduler
