// Tests the form of the optimizers of whole parameters that computes one float
// at a time against Highway's on every target, bit by bit.

#include "kernels/scalar/non_separable_update.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/targets.h"
#include "kernels/cpu/whole_rules.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::scalar {
namespace {

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// The bits of what was computed.
using Bits = std::vector<uint32_t>;

// One parameter in training.
class Parameter {
 public:
  Parameter(OptimizerKind kind, std::vector<int64_t> shape, uint32_t seed)
      : kind_(kind), shape_(std::move(shape)), numel_(NumelOf(shape_)) {
    std::mt19937 random(seed);
    master_ = Normal(&random, 1);
    gradient_ = Normal(&random, 1e-2f);
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (static_cast<size_t>(k) >= InfoOf(kind_).state_arrays.size()) continue;
      state_[k].resize(StateElements(InfoOf(kind_), k, shape_));
      for (float& value : state_[k]) {
        value = std::abs(std::normal_distribution<float>(0, 1e-3f)(random));
      }
    }
  }

  std::vector<float>& gradient() { return gradient_; }

  // Returns the new master and states.
  Bits Computed(
      const std::function<void(const UpdateInput&, const WholeView&)>& compute,
      const UpdateInput& input, uint64_t workspace_elements) const {
    std::vector<float> new_master(numel_);
    std::vector<float> new_state[kStateArraysMax];
    WholeView view;
    view.shape = shape_;
    view.numel = numel_;
    view.gradient = gradient_.data();
    view.master = master_.data();
    view.new_master = new_master.data();
    for (int k = 0; k < kStateArraysMax; ++k) {
      new_state[k].resize(state_[k].size());
      view.state[k] = state_[k].data();
      view.new_state[k] = new_state[k].data();
    }
    const size_t bytes = (workspace_elements * sizeof(float) / 64 + 1) * 64;
    const std::unique_ptr<float, FreeDeleter> workspace(
        static_cast<float*>(std::aligned_alloc(64, bytes)));
    view.workspace = workspace.get();
    compute(input, view);
    Bits bits;
    for (float value : new_master) {
      bits.push_back(std::bit_cast<uint32_t>(value));
    }
    for (const auto& array : new_state) {
      for (float value : array) bits.push_back(std::bit_cast<uint32_t>(value));
    }
    return bits;
  }

  // Returns what the target's kernel computes.
  Bits ComputedOn(cpu::Target target, const UpdateInput& input) const {
    const WholeKernel& kernel = *cpu::FindWholeKernel(kind_, target);
    return Computed(kernel.compute, input, kernel.workspace_elements(shape_));
  }

 private:
  std::vector<float> Normal(std::mt19937* random, float size) const {
    std::normal_distribution<float> normal(0, size);
    std::vector<float> values(numel_);
    for (float& value : values) value = normal(*random);
    return values;
  }

  const OptimizerKind kind_;
  const std::vector<int64_t> shape_;
  const size_t numel_;
  std::vector<float> master_;
  std::vector<float> gradient_;
  std::vector<float> state_[kStateArraysMax];
};

// Gradients of zeros, of denormals and one that is non-finite, besides those
// that training sees.
void ForSpecialGradients(Parameter* parameter,
                         const std::function<void()>& check) {
  check();
  const std::vector<float> ordinary = parameter->gradient();
  for (float special : {0.0f, 1e-41f, HUGE_VALF, std::nanf("")}) {
    parameter->gradient() = ordinary;
    parameter->gradient()[parameter->gradient().size() / 2] = special;
    check();
  }
  for (float& value : parameter->gradient()) value = 0;
  check();
}

const std::vector<int64_t> kShapes[] = {{},      {1},     {37},       {300},
                                        {7, 33}, {33, 7}, {2, 3, 17}, {1, 1}};

class NonSeparableUpdateTest : public testing::TestWithParam<OptimizerKind> {};

TEST_P(NonSeparableUpdateTest, IsWhatEveryTargetComputes) {
  for (const std::vector<int64_t>& shape : kShapes) {
    for (double weight_decay : {0.0, 0.05}) {
      for (int64_t step_count : {1, 5, 1000}) {
        UpdateInput input;
        input.hyperparams = DefaultHyperparams(GetParam());
        input.hyperparams[GetParam() == OptimizerKind::kLamb
                              ? static_cast<size_t>(adam::kWeightDecay)
                              : static_cast<size_t>(adafactor::kWeightDecay)] =
            weight_decay;
        input.step_count = step_count;
        Parameter parameter(GetParam(), shape, TestSeed());
        ForSpecialGradients(&parameter, [&] {
          const Bits expected = parameter.Computed(
              [](const UpdateInput& its_input, const WholeView& view) {
                EXPECT_TRUE(ComputeWhole(GetParam(), its_input, view));
              },
              input, 0);
          for (cpu::Target target : cpu::SupportedTargets()) {
            ASSERT_EQ(parameter.ComputedOn(target, input), expected)
                << cpu::TargetName(target) << " step " << step_count;
          }
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, NonSeparableUpdateTest,
                         testing::Values(OptimizerKind::kLamb,
                                         OptimizerKind::kAdafactor));

TEST(MuonTest, IsWhatEveryTargetComputesButForProducts) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{1, 1}, {7, 33}, {30, 40}}) {
    for (double nesterov : {0.0, 1.0}) {
      UpdateInput input;
      input.hyperparams = DefaultHyperparams(OptimizerKind::kMuon);
      input.hyperparams[muon::kNesterov] = nesterov;
      input.hyperparams[muon::kNsSteps] = 0;
      Parameter parameter(OptimizerKind::kMuon, shape, TestSeed());
      ForSpecialGradients(&parameter, [&] {
        const Bits expected =
            parameter.Computed(&ComputeMuonWithoutSteps, input, 0);
        for (cpu::Target target : cpu::SupportedTargets()) {
          ASSERT_EQ(parameter.ComputedOn(target, input), expected)
              << cpu::TargetName(target);
        }
      });
    }
  }
}

TEST(ComputeWholeTest, KnowsNoOther) {
  EXPECT_FALSE(ComputeWhole(OptimizerKind::kMuon, {}, {}));
}

}  // namespace
}  // namespace optstate::kernels::scalar
