// What is left when a process is killed in a kernel, at every instruction.
//
// A child runs the kernel on shared memory, one instruction at a time. After
// each, the test takes a copy of that memory, rolls back what is in flight and
// goes on from there: the result must be that of a kernel left in peace.

#include "kernels/undo.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/rules.h"
#include "kernels/cpu/targets.h"
#include "kernels/single_step.h"
#include "kernels/split_master.h"
#include "kernels/state_format.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate {
namespace {

using cpu::SupportedTargets;
using cpu::Target;
using cpu::TargetName;

constexpr size_t kNumelMax = 320;
constexpr int kArrays = 1 + kStateArraysMax;
// Every state array, and a parameter that is not the master.
constexpr UpdateKernelKey kLargestKey = {OptimizerKind::kAdamW, adam::kAmsgrad,
                                         DType::kBFloat16, DType::kBFloat16};

bool HasState(const UpdateKernelKey& key, int k) {
  return HasStateArray(InfoOf(key.optimizer), k, key.options);
}

constexpr size_t kBlocksMax = 2;
static_assert(kNumelMax <= kBlocksMax * kQuantizedBlockElements);

// What a kernel writes besides its slot.
struct Arrays {
  float array[kArrays][kNumelMax];  // master and state, or the sum alone
  float scale[kStateArraysMax][kBlocksMax];  // of state that is of bytes
  uint32_t parameter[kNumelMax];             // enough for every dtype

  bool operator==(const Arrays& other) const {
    return std::memcmp(this, &other, sizeof(*this)) == 0;
  }

  // Of the arrays that `key` has.
  TileView View(const UpdateKernelKey& key, size_t numel) {
    TileView view;
    view.parameter = parameter;
    view.master = array[0];  // of a split one the low halves
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (HasState(key, k)) view.state[k] = array[1 + k];
      view.scale[k] = scale[k];
    }
    view.numel = numel;
    return view;
  }
};

UndoPhase PhaseOf(const UndoSlot& slot) {
  return InFlightOf(slot.progress.load()).phase;
}

bool IsSplit(const UpdateKernelKey& key) {
  return key.master == MasterFormat::kSplit;
}

size_t MasterBytes(const UpdateKernelKey& key) { return IsSplit(key) ? 2 : 4; }

size_t StateBytes(StateFormat format) {
  return format == StateFormat::kFloat32    ? 4
         : format == StateFormat::kBFloat16 ? 2
                                            : 1;
}

// Elements [0, begin) as in `head`, the others as in `rest`.
Arrays Splice(const Arrays& head, const Arrays& rest, size_t begin,
              const UpdateKernelKey& key) {
  Arrays spliced = rest;
  std::memcpy(spliced.array[0], head.array[0], begin * MasterBytes(key));
  const size_t blocks =
      (begin + kQuantizedBlockElements - 1) / kQuantizedBlockElements;
  for (int k = 0; k < kStateArraysMax; ++k) {
    std::memcpy(spliced.array[1 + k], head.array[1 + k],
                begin * StateBytes(key.state));
    std::copy_n(head.scale[k], blocks, spliced.scale[k]);
  }
  std::memcpy(spliced.parameter, head.parameter,
              begin * SizeInBytes(key.parameter));
  return spliced;
}

// What outlives the child.
struct Shared {
  UndoSlot slot;
  Arrays arrays;
  // Enough for every dtype. A sum of several gradients adds this one again.
  uint32_t gradient[kNumelMax];
};

// What a process that comes later works on, so that the child can go on. Of the
// slot, what an update uses.
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

void EncodeState(const UpdateKernelKey& key, int k, Arrays* arrays) {
  float* array = arrays->array[1 + k];
  const std::vector<float> values(array, array + kNumelMax);
  StateFromFloat(key.state, IsNeverNegative(key.optimizer, k), values.data(),
                 array, arrays->scale[k], kNumelMax);
}

// Values that every rule changes, in all arrays; garbage in the slot.
void Fill(Shared* shared, const UpdateKernelKey& key, std::mt19937* random) {
  const DType gradient = key.gradient;
  std::uniform_real_distribution<float> values(0.5f, 1.5f);
  std::memset(static_cast<void*>(&shared->slot), 0xA5, sizeof(shared->slot));
  shared->slot.progress.store(0);
  shared->slot.saved.store(0);
  for (size_t i = 0; i < kNumelMax; ++i) {
    for (auto& array : shared->arrays.array) array[i] = values(*random);
    // exp_avg_sq grows and max_exp_avg_sq follows it; grad_avg, in the same
    // place, is less than the root of square_avg.
    shared->arrays.array[3][i] = 0.25f;
    shared->arrays.parameter[i] = 0xA5A5A5A5;
  }
  for (int k = 0; k < kStateArraysMax; ++k) {
    EncodeState(key, k, &shared->arrays);
  }
  if (IsSplit(key)) {
    float* const master = shared->arrays.array[0];
    const std::vector<float> masters(master, master + kNumelMax);
    SplitMaster(masters.data(),
                reinterpret_cast<uint16_t*>(shared->arrays.parameter),
                reinterpret_cast<uint16_t*>(master), kNumelMax);
  }
  std::vector<float> gradients(kNumelMax);
  for (float& x : gradients) x = 2 + values(*random);
  cpu::CastFromFloatOn(SupportedTargets().back(), gradient, gradients.data(),
                       shared->gradient, kNumelMax);
}

void ExpectChanged(const Arrays& before, const Arrays& after, int array,
                   size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    EXPECT_NE(after.array[array][i], before.array[array][i])
        << "array " << array << " at " << i;
  }
}

// Elements in a vector; 16 cuts those of unnamed targets somewhere too.
size_t LanesOf(Target target) {
  const absl::string_view name = TargetName(target);
#if defined(PR_SVE_GET_VL) && defined(__aarch64__)
  if (name == "SVE") {
    // The machine's and the kernel's choice.
    const auto vl = static_cast<size_t>(prctl(PR_SVE_GET_VL));
    return (vl & PR_SVE_VL_LEN_MASK) / sizeof(float);
  }
#endif
  if (name == "AVX2") return 8;
  if (name == "SSE4" || name == "NEON") return 4;
  return name == "SCALAR" ? 1 : 16;
}

// 1, a vector and its neighbours, three vectors and a tail.
std::vector<size_t> SizesAround(size_t lanes) {
  return {1, std::max<size_t>(lanes, 2) - 1, lanes, lanes + 1,
          3 * lanes + lanes / 2};
}

// With decay and, where there is one, momentum.
UpdateFactors Factors(const UpdateKernelKey& key) {
  UpdateInput input;
  input.hyperparams = SettingsOf({key.optimizer, key.options})[1].hyperparams;
  input.step_count = 9;
  return FactorsAt(*cpu::FindKernel(key, SupportedTargets().back()),
                   key.optimizer, input);
}

class UndoTest : public testing::TestWithParam<Target> {
 protected:
  // The child updates elements [begin, numel); those before are already.
  // Returns StepThrough's.
  int64_t StepThroughUpdate(const UpdateKernelKey& key, size_t numel,
                            size_t begin = 0, size_t gradient_count = 1) {
    const UpdateKernel& kernel = *cpu::FindKernel(key, GetParam());
    const UpdateFactors factors = Factors(key);
    const std::vector<const void*> gradients(gradient_count, shared_->gradient);
    Fill(shared_.get(), key, &random_);
    for (size_t i : nans_) shared_->gradient[i] = 0x7FC00000;
    const Arrays before = shared_->arrays;
    Arrays after = before;
    TileView view = after.View(key, numel);
    view.gradients = gradients;
    kernel.apply(factors, view);
    ExpectChanged(before, after, 0, numel * MasterBytes(key) / sizeof(float));
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!HasState(key, k)) continue;
      if (key.state == StateFormat::kFloat32) {
        ExpectChanged(before, after, 1 + k, numel);
      } else {
        // Some round to what they were.
        EXPECT_NE(std::memcmp(before.array[1 + k], after.array[1 + k],
                              numel * StateBytes(key.state)),
                  0);
      }
    }

    shared_->arrays = Splice(after, before, begin, key);
    shared_->slot.progress.store(UndoProgress(begin));
    view = shared_->arrays.View(key, numel);
    view.gradients = gradients;
    view.begin = begin;
    view.undo = &shared_->slot;
    size_t updated = begin;
    xors_.clear();
    auto last = std::make_unique<Copy>(*shared_.get());
    bool is_first = true;
    const int64_t instructions = StepThrough(
        [&] { kernel.apply(factors, view); },
        [&](int64_t instruction) {
          auto now = std::make_unique<Copy>(*shared_.get());
          // Most instructions store nothing here.
          if (!is_first && *now == *last) return true;
          is_first = false;
          last = std::move(now);
          Copy copy(*shared_.get());
          TileView rest = copy.arrays.View(key, numel);
          const absl::StatusOr<size_t> rolled_back =
              RollBack(rest, kernel, key.state, key.master, &copy.slot);
          if (!rolled_back.ok() || *rolled_back < updated) return false;
          updated = *rolled_back;
          if (PhaseOf(copy.slot) == UndoPhase::kOldValues) {
            // Of what is not updated, the parameter may have either value,
            // unless it is half of its master.
            Arrays expected = Splice(after, before, updated, key);
            if (!IsSplit(key)) {
              std::memcpy(expected.parameter, copy.arrays.parameter,
                          numel * SizeInBytes(key.parameter));
            }
            if (copy.arrays != expected ||
                copy.slot.progress.load() != UndoProgress(updated) ||
                std::memcmp(copy.arrays.parameter, after.parameter,
                            updated * SizeInBytes(key.parameter)) != 0) {
              return false;
            }
          } else {
            xors_.push_back(std::make_unique<Copy>(copy));
          }
          // Every target in turn: who goes on need not be on the same machine.
          const Target target =
              SupportedTargets()[static_cast<size_t>(instruction) %
                                 SupportedTargets().size()];
          rest.gradients = gradients;
          rest.begin = updated;
          rest.undo = &copy.slot;
          cpu::FindKernel(key, target)->apply(factors, rest);
          return copy.arrays == after;
        });
    // Progress has gone along, with two vectors in flight at most.
    if (instructions >= 0) {
      EXPECT_LE(numel - updated, key.state == StateFormat::kDynamic8
                                     ? 0
                                     : 2 * LanesOf(GetParam()));
    }
    return instructions;
  }

  int64_t StepThroughAccumulate(DType dtype, size_t numel,
                                size_t gradient_count = 1,
                                DType sum_dtype = DType::kFloat32) {
    const std::vector<const void*> gradients(gradient_count, shared_->gradient);
    Fill(shared_.get(), {.gradient = dtype}, &random_);
    const Arrays before = shared_->arrays;
    const int64_t instructions = StepThrough(
        [&] {
          cpu::AccumulateOn(GetParam(), dtype, gradients,
                            /*first=*/false, sum_dtype,
                            shared_->arrays.array[0], numel, &shared_->slot);
        },
        [&](int64_t /*instruction*/) {
          Arrays copy = shared_->arrays;
          return RollBackSum(shared_->slot, sum_dtype, copy.array[0], numel)
                     .ok() &&
                 copy == before;
        });
    // Every element was there to be rolled back.
    if (instructions >= 0) {
      EXPECT_EQ(shared_->slot.saved.load(), numel);
      // One of 16 bits may swallow what is added to it.
      if (sum_dtype == DType::kFloat32) {
        ExpectChanged(before, shared_->arrays, 0, numel);
      }
    }
    return instructions;
  }

  SharedMemory<Shared> shared_;
  std::mt19937 random_{TestSeed()};
  std::vector<size_t> nans_;  // of the gradient, for updates with float32 ones
  // What the last update left wherever it had kept a xor.
  std::vector<std::unique_ptr<Copy>> xors_;
};

// Every pair of dtypes where each has a kernel of its own, else two that
// differ; with two vectors, another and a tail.
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

// SVE may have vectors of which no pair fits the slot: then nothing is xored.
bool HasPairs(Target target) {
  return 2 * LanesOf(target) <= kUndoVectorElements;
}

// Of AdamW's pairs of vectors but one of their bits is kept.
constexpr UpdateKernelKey kXorKeys[] = {
    {OptimizerKind::kAdamW, 0, DType::kFloat32, DType::kFloat32},
    {OptimizerKind::kAdam, 0, DType::kBFloat16, DType::kBFloat16},
    {OptimizerKind::kAdamW, 0, DType::kBFloat16, DType::kBFloat16,
     StateFormat::kFloat32, MasterFormat::kSplit}};

// Whoever finishes them is killed too, at every instruction. Two pairs, because
// the second one's xor may not come where the first one's is.
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
      // One of each is enough: its stores are those of all.
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

// Not to be relied on, but no rubbish either: of each element the old or the
// new state, updated with what is there now, or all that it was to become.
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

// A block and the beginning of another, which has an undo of its own kind.
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

// Many vectors of it.
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

// Whoever goes on is killed too, wherever the one before had been.
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

class RollBackTest : public testing::Test {
 protected:
  // As after a kernel that was killed when it had just written the new values
  // of elements [begin, begin + length), all of them -1.
  void KillAt(size_t begin, size_t position, size_t length) {
    Fill(shared_.get(), {}, &random_);
    before_ = shared_->arrays;
    for (int k = 0; k < kArrays; ++k) {
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
        // It keeps no xor.
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
  // Nor is more than a tile believed, whatever the view says.
  slot_->saved.store(kTileElements + 1);
  EXPECT_EQ(RollBackSum(*slot_, DType::kFloat32, sum_.data(), 2 * kTileElements)
                .code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(sum_, sum);
}

}  // namespace
}  // namespace optstate
