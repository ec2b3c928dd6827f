// What is left when a process is killed in a kernel, at every instruction.
//
// A child runs the kernel on shared memory, one instruction at a time
// (ptrace). After each, the memory is what a SIGKILL at this point would have
// left: the test rolls a copy of it back and compares that with the beginning.

#include "kernels/undo.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kernels/cpu/adam.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/targets.h"
#include "kernels/hyperparams.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer_kind.h"

namespace optstate {
namespace {

using cpu::SupportedTargets;
using cpu::Target;
using cpu::TargetName;

constexpr size_t kNumelMax = 304;
constexpr int kArrays = 1 + kMaxStateArrays;
constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16,
                                DType::kFloat16};

// Master and state arrays, or the sum and nothing else.
struct Arrays {
  float array[kArrays][kNumelMax];

  bool operator==(const Arrays& other) const {
    return std::memcmp(this, &other, sizeof(*this)) == 0;
  }

  TileView View(size_t numel) {
    TileView view;
    view.master = array[0];
    for (int k = 0; k < kMaxStateArrays; ++k) view.state[k] = array[1 + k];
    view.numel = numel;
    return view;
  }
};

enum class Stage : uint32_t { kBefore, kInside, kAfter };

// What outlives the child.
struct Shared {
  UndoSlot slot;
  Arrays arrays;
  uint32_t gradient[kNumelMax];  // enough for every dtype
  uint32_t parameter[kNumelMax];
  std::atomic<Stage> stage;
};

class SharedMemory {
 public:
  SharedMemory() {
    void* pages = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) std::abort();
    shared_ = new (pages) Shared;
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { munmap(shared_, sizeof(Shared)); }

  Shared* get() const { return shared_; }
  Shared* operator->() const { return shared_; }

 private:
  Shared* shared_;
};

// Values that every rule changes, in all arrays; garbage in the slot.
void Fill(Shared* shared, DType gradient, std::mt19937* random) {
  std::uniform_real_distribution<float> values(0.5f, 1.5f);
  std::memset(shared->slot.old, 0xA5, sizeof(shared->slot.old));
  shared->slot.saved.store(0);
  for (size_t i = 0; i < kNumelMax; ++i) {
    for (auto& array : shared->arrays.array) array[i] = values(*random);
    // exp_avg_sq grows, max_exp_avg_sq follows it.
    shared->arrays.array[3][i] = 0.25f;
  }
  std::vector<float> gradients(kNumelMax);
  for (float& x : gradients) x = 2 + values(*random);
  cpu::CastFromFloatOn(SupportedTargets().back(), gradient, gradients.data(),
                       shared->gradient, kNumelMax);
}

constexpr int kTraceRefused = 77;

// Runs `work` in a child and `check` after each of its instructions, with the
// memory as it is then. Returns the number of instructions, or -1 when this
// machine allows no tracing.
int64_t StepThrough(Shared* shared, const std::function<void()>& work,
                    const std::function<bool()>& check) {
  shared->stage.store(Stage::kBefore);
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(kTraceRefused);
    raise(SIGSTOP);
    shared->stage.store(Stage::kInside);
    work();
    shared->stage.store(Stage::kAfter);
    _exit(0);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) return -1;
  if (WIFEXITED(status)) return -1;
  int64_t instructions = 0;
  bool goes_on = true;
  while (goes_on && shared->stage.load() != Stage::kAfter) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0 ||
        waitpid(child, &status, 0) != child || !WIFSTOPPED(status) ||
        WSTOPSIG(status) != SIGTRAP) {
      ADD_FAILURE() << "the child does not step, status " << status;
      break;
    }
    ++instructions;
    goes_on = check();
    EXPECT_TRUE(goes_on) << "after instruction " << instructions << ", saved "
                         << shared->slot.saved.load();
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return instructions;
}

#define SKIP_IF_UNTRACEABLE(instructions)                         \
  if ((instructions) < 0) {                                       \
    GTEST_SKIP() << "this machine does not let us trace a child"; \
  }

// Elements in a vector; 16 cuts those of unnamed targets somewhere too.
size_t LanesOf(Target target) {
  const absl::string_view name = TargetName(target);
  if (name == "AVX2") return 8;
  if (name == "SSE4" || name == "NEON") return 4;
  return name == "SCALAR" ? 1 : 16;
}

// 1, a vector and its neighbours, three vectors and a tail.
std::vector<size_t> SizesAround(size_t lanes) {
  return {1, std::max<size_t>(lanes, 2) - 1, lanes, lanes + 1,
          3 * lanes + lanes / 2};
}

UpdateFactors Factors(const UpdateKernel& kernel) {
  Hyperparams hyperparams;
  hyperparams.weight_decay = 0.1;
  return kernel.prepare(hyperparams, 3, 1);
}

class UndoTest : public testing::TestWithParam<Target> {
 protected:
  // Returns StepThrough's.
  int64_t StepThroughUpdate(const UpdateKernelKey& key, size_t numel) {
    const UpdateKernel& kernel = *cpu::AdamKernel(key, GetParam());
    const UpdateFactors factors = Factors(kernel);
    const int states = static_cast<int>(kernel.state_array_names.size());
    Fill(shared_.get(), key.gradient, &random_);
    const Arrays before = shared_->arrays;
    TileView view = shared_->arrays.View(numel);
    view.gradient = shared_->gradient;
    view.parameter = shared_->parameter;
    view.undo = &shared_->slot;

    const int64_t instructions = StepThrough(
        shared_.get(), [&] { kernel.apply(factors, view); },
        [&] {
          Arrays copy = shared_->arrays;
          return RollBack(shared_->slot, copy.View(numel), states).ok() &&
                 copy == before;
        });
    // Every element was there to be rolled back.
    if (instructions >= 0) ExpectChanged(before, 1 + states, numel);
    return instructions;
  }

  int64_t StepThroughAccumulate(DType dtype, size_t numel) {
    Fill(shared_.get(), dtype, &random_);
    const Arrays before = shared_->arrays;
    const int64_t instructions = StepThrough(
        shared_.get(),
        [&] {
          cpu::AccumulateOn(GetParam(), dtype, shared_->gradient,
                            /*first=*/false, shared_->arrays.array[0], numel,
                            &shared_->slot);
        },
        [&] {
          Arrays copy = shared_->arrays;
          return RollBackSum(shared_->slot, copy.array[0], numel).ok() &&
                 copy == before;
        });
    if (instructions >= 0) ExpectChanged(before, 1, numel);
    return instructions;
  }

  void ExpectChanged(const Arrays& before, int arrays, size_t numel) {
    EXPECT_EQ(shared_->slot.saved.load(), numel);
    for (int k = 0; k < arrays; ++k) {
      for (size_t i = 0; i < numel; ++i) {
        EXPECT_NE(shared_->arrays.array[k][i], before.array[k][i])
            << "array " << k << " at " << i;
      }
    }
  }

  SharedMemory shared_;
  std::mt19937 random_{TestSeed()};
};

TEST_P(UndoTest, UpdateRollsBackFromEveryInstruction) {
  for (OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW}) {
    for (bool amsgrad : {false, true}) {
      for (DType gradient : kAllDTypes) {
        for (DType parameter : kAllDTypes) {
          const UpdateKernelKey key = {kind, amsgrad, gradient, parameter};
          for (size_t numel : SizesAround(LanesOf(GetParam()))) {
            SCOPED_TRACE(absl::StrCat(Name(gradient), " to ", Name(parameter),
                                      amsgrad ? " amsgrad x " : " x ", numel));
            SKIP_IF_UNTRACEABLE(StepThroughUpdate(key, numel));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(UndoTest, LongUpdateRollsBackFromEveryInstruction) {
  const UpdateKernelKey key = {OptimizerKind::kAdamW, /*amsgrad=*/true,
                               DType::kBFloat16, DType::kBFloat16};
  SKIP_IF_UNTRACEABLE(StepThroughUpdate(key, kNumelMax - 1));
}

TEST_P(UndoTest, AccumulateRollsBackFromEveryInstruction) {
  std::vector<size_t> sizes = SizesAround(LanesOf(GetParam()));
  sizes.push_back(kNumelMax - 1);
  for (DType dtype : kAllDTypes) {
    for (size_t numel : sizes) {
      SCOPED_TRACE(absl::StrCat(Name(dtype), " x ", numel));
      SKIP_IF_UNTRACEABLE(StepThroughAccumulate(dtype, numel));
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

class RollBackTest : public testing::Test {
 protected:
  // As after a kernel that was killed behind the last new value.
  void Finish(size_t numel) {
    Fill(shared_.get(), DType::kFloat32, &random_);
    before_ = shared_->arrays;
    for (int k = 0; k < kArrays; ++k) {
      std::copy_n(before_.array[k], numel, shared_->slot.old[k]);
      std::fill_n(shared_->arrays.array[k], numel, -1.0f);
    }
    shared_->slot.saved.store(numel);
  }

  SharedMemory shared_;
  std::mt19937 random_{TestSeed()};
  Arrays before_;
};

// A process killed in RollBack leaves a view that rolls back just the same.
TEST_F(RollBackTest, RunsAgainFromEveryInstruction) {
  for (size_t numel : {1, 17, 303}) {
    Finish(numel);
    SKIP_IF_UNTRACEABLE(StepThrough(
        shared_.get(),
        [&] {
          RollBack(shared_->slot, shared_->arrays.View(numel), kMaxStateArrays)
              .IgnoreError();
        },
        [&] {
          Arrays copy = shared_->arrays;
          return RollBack(shared_->slot, copy.View(numel), kMaxStateArrays)
                     .ok() &&
                 copy == before_;
        }));
    EXPECT_EQ(shared_->arrays, before_);
  }
}

TEST_F(RollBackTest, TouchesOnlyWhatWasSavedOfTheArraysInUse) {
  Finish(100);
  shared_->slot.saved.store(7);
  Arrays expected = shared_->arrays;
  for (int k = 0; k < 3; ++k) {
    std::copy_n(before_.array[k], 7, expected.array[k]);
  }
  ASSERT_TRUE(RollBack(shared_->slot, shared_->arrays.View(100), 2).ok());
  EXPECT_EQ(shared_->arrays, expected);
}

TEST_F(RollBackTest, SumIsTheFirstArray) {
  Finish(100);
  Arrays expected = shared_->arrays;
  std::copy_n(before_.array[0], 100, expected.array[0]);
  ASSERT_TRUE(RollBackSum(shared_->slot, shared_->arrays.array[0], 100).ok());
  EXPECT_EQ(shared_->arrays, expected);
}

TEST_F(RollBackTest, NothingSavedIsNothingToDo) {
  Finish(0);
  ASSERT_TRUE(RollBack(shared_->slot, shared_->arrays.View(0), 3).ok());
  EXPECT_EQ(shared_->arrays, before_);
}

TEST_F(RollBackTest, MoreSavedThanThereAreIsDataLoss) {
  Finish(100);
  const Arrays arrays = shared_->arrays;
  shared_->slot.saved.store(101);
  EXPECT_EQ(RollBack(shared_->slot, shared_->arrays.View(100), 3).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(RollBackSum(shared_->slot, shared_->arrays.array[0], 100).code(),
            absl::StatusCode::kDataLoss);
  // Nor is more than a tile believed, whatever the view says.
  shared_->slot.saved.store(kTileElements + 1);
  EXPECT_EQ(RollBack(shared_->slot, shared_->arrays.View(2 * kTileElements), 3)
                .code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(shared_->arrays, arrays);
}

}  // namespace
}  // namespace optstate
