#include "kernels/undo_harness.h"

#include <algorithm>

#include "absl/status/statusor.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/rules.h"
#include "kernels/state_format.h"
#include "kernels/test_keys.h"

namespace optstate::kernels {

using cpu::SupportedTargets;
using cpu::Target;

namespace {

// Returns elements [0, begin) as in `head`, the others as in `rest`.
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

void EncodeState(const UpdateKernelKey& key, int k, Arrays* arrays) {
  float* array = arrays->array[1 + k];
  const std::vector<float> values(array, array + kNumelMax);
  StateFromFloat(key.state, IsNeverNegative(key.optimizer, k), values.data(),
                 array, arrays->scale[k], kNumelMax);
}

void ExpectChanged(const Arrays& before, const Arrays& after, int array,
                   size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    EXPECT_NE(after.array[array][i], before.array[array][i])
        << "array " << array << " at " << i;
  }
}

}  // namespace

void Fill(Shared* shared, const UpdateKernelKey& key, std::mt19937* random) {
  const DType gradient = key.gradient;
  std::uniform_real_distribution<float> values(0.5f, 1.5f);
  std::memset(static_cast<void*>(&shared->slot), 0xA5, sizeof(shared->slot));
  shared->slot.progress.store(0);
  shared->slot.saved.store(0);
  shared->arrays.Fill(random);
  for (int k = 0; k < kStateArraysMax; ++k) {
    EncodeState(key, k, &shared->arrays);
  }
  if (IsSplit(key)) shared->arrays.Split();
  std::vector<float> gradients(kNumelMax);
  for (float& x : gradients) x = 2 + values(*random);
  cpu::CastFromFloatOn(SupportedTargets().back(), gradient, gradients.data(),
                       shared->gradient, kNumelMax);
}

UpdateFactors Factors(const UpdateKernelKey& key) {
  UpdateInput input;
  input.hyperparams = SettingsOf({key.optimizer, key.options})[1].hyperparams;
  input.step_count = 9;
  return FactorsAt(*cpu::FindKernel(key, SupportedTargets().back()),
                   key.optimizer, input);
}

int64_t UndoTest::StepThroughUpdate(const UpdateKernelKey& key, size_t numel,
                                    size_t begin, size_t gradient_count) {
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
      // Some values round to what they were.
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
          // The parameter of what is not updated may have either value, unless
          // it is half of its master.
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
        // The targets take turns: the process that goes on need not be on the
        // same machine.
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

int64_t UndoTest::StepThroughAccumulate(DType dtype, size_t numel,
                                        size_t gradient_count,
                                        DType sum_dtype) {
  const std::vector<const void*> gradients(gradient_count, shared_->gradient);
  Fill(shared_.get(), {.gradient = dtype}, &random_);
  const Arrays before = shared_->arrays;
  const int64_t instructions = StepThrough(
      [&] {
        cpu::AccumulateOn(GetParam(), dtype, gradients,
                          /*first=*/false, sum_dtype, shared_->arrays.array[0],
                          numel, &shared_->slot);
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
    // A sum of 16 bits may swallow what is added to it.
    if (sum_dtype == DType::kFloat32) {
      ExpectChanged(before, shared_->arrays, 0, numel);
    }
  }
  return instructions;
}

}  // namespace optstate::kernels
