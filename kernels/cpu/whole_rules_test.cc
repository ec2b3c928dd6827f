// Tests every target against the one without SIMD, bit by bit. Whether that one
// is right is for whole_kernel_test.cc.

#include "kernels/cpu/whole_rules.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kernels/cpu/guarded_array.h"
#include "kernels/cpu/targets.h"
#include "kernels/test_seed.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cpu {
namespace {

using Shape = std::vector<int64_t>;

constexpr uint32_t kCanonicalNan = 0x7FC00000;

Target PlainTarget() { return SupportedTargets().back(); }

// The arrays that a kernel reads.
struct Parameter {
  Shape shape;
  std::vector<float> gradient;
  std::vector<float> master;
  std::vector<float> state[kStateArraysMax];
};

// The arrays that it wrote, as bits.
struct Result {
  std::vector<uint32_t> arrays[1 + kStateArraysMax];

  bool operator==(const Result& other) const = default;
};

std::vector<uint32_t> BitsOf(const GuardedArray<float>& array) {
  std::vector<uint32_t> bits;
  for (float x : array.elements()) bits.push_back(std::bit_cast<uint32_t>(x));
  return bits;
}

// Checks that nothing is written but what should be; the workspace is full of
// what an earlier call may have left. `in_place`: the new state is where the
// old one was.
Result Compute(Target target, OptimizerKind kind,
               const Hyperparams& hyperparams, int64_t step_count,
               const Parameter& parameter, bool in_place = false) {
  const WholeKernel& kernel = *FindWholeKernel(kind, target);
  const GuardedArray<float> gradient(parameter.gradient, 3);
  const GuardedArray<float> master(parameter.master, 5);
  GuardedArray<float> new_master(std::vector<float>(master.elements().size()),
                                 7);
  std::vector<GuardedArray<float>> state;
  std::vector<GuardedArray<float>> new_state;
  for (const auto& elements : parameter.state) {
    state.emplace_back(elements, 9 + state.size());
    new_state.emplace_back(std::vector<float>(elements.size()),
                           11 + 2 * new_state.size());
  }
  constexpr size_t kGuardElements = 16;
  const size_t workspace_elements = kernel.workspace_elements(parameter.shape);
  const size_t bytes = (workspace_elements + kGuardElements) * sizeof(float);
  float* workspace =
      static_cast<float*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  const float kOld = std::bit_cast<float>(0xFFF00001u);
  std::fill_n(workspace, workspace_elements + kGuardElements, kOld);

  UpdateInput input;
  input.hyperparams = hyperparams;
  input.step_count = step_count;
  WholeView view;
  view.shape = parameter.shape;
  view.numel = parameter.master.size();
  view.gradient = gradient.data();
  view.master = master.data();
  view.new_master = new_master.data();
  view.workspace = workspace;
  for (size_t k = 0; k < kStateArraysMax; ++k) {
    view.state[k] = state[k].data();
    view.new_state[k] = in_place ? state[k].data() : new_state[k].data();
  }
  kernel.compute(input, view);

  for (size_t i = 0; i < kGuardElements; ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(workspace[workspace_elements + i]),
              std::bit_cast<uint32_t>(kOld));
  }
  std::free(workspace);
  EXPECT_TRUE(new_master.GuardsAreIntact());
  Result result;
  result.arrays[0] = BitsOf(new_master);
  for (size_t k = 0; k < kStateArraysMax; ++k) {
    EXPECT_TRUE(state[k].GuardsAreIntact());
    EXPECT_TRUE(new_state[k].GuardsAreIntact());
    result.arrays[1 + k] = BitsOf(in_place ? state[k] : new_state[k]);
  }
  return result;
}

std::vector<float> RandomFloats(size_t numel, std::mt19937* random) {
  // The values spread over many magnitudes, so that the order shows in the last
  // bits.
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-20, 4);
  std::vector<float> values(numel);
  for (float& x : values) x = normal(*random) * std::exp(exponent(*random));
  return values;
}

// State that is never negative is a possible one of every optimizer.
Parameter RandomParameter(OptimizerKind kind, const Shape& shape,
                          std::mt19937* random) {
  Parameter parameter;
  parameter.shape = shape;
  parameter.gradient = RandomFloats(NumelOf(shape), random);
  parameter.master = RandomFloats(NumelOf(shape), random);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (static_cast<size_t>(k) >= InfoOf(kind).state_arrays.size()) break;
    parameter.state[k] =
        RandomFloats(StateElements(InfoOf(kind), k, shape), random);
    for (float& x : parameter.state[k]) x = std::abs(x);
  }
  return parameter;
}

std::vector<Shape> ShapesOf(OptimizerKind kind) {
  const WholeKernel& kernel = *FindWholeKernel(kind, PlainTarget());
  std::vector<Shape> shapes;
  for (const Shape& shape : std::vector<Shape>{
           {},         {0},    {1},       {17},           {31},
           {4097},     {3, 5}, {64, 65},  {65, 64},       {2, 3, 5},
           {128, 300}, {1, 1}, {1, 40},   {40, 1},        {33, 31},
           {0, 3},     {3, 0}, {2, 0, 3}, {2, 2, 19, 33}, {130, 257},
           {257, 130}}) {
    if (kernel.check_shape(shape).ok()) shapes.push_back(shape);
  }
  return shapes;
}

std::vector<OptimizerKind> AllKinds() {
  std::vector<OptimizerKind> kinds;
  for (const OptimizerInfo& info : Optimizers()) {
    if (FindWholeKernel(info.kind, PlainTarget()) != nullptr) {
      kinds.push_back(info.kind);
    }
  }
  return kinds;
}

class WholeRulesTest : public testing::TestWithParam<OptimizerKind> {
 protected:
  // Returns the defaults but for weight decay, where there may be none.
  Hyperparams hyperparams() const {
    Hyperparams hyperparams = DefaultHyperparams(GetParam());
    const auto infos = InfoOf(GetParam()).hyperparams;
    for (size_t i = 0; i < infos.size(); ++i) {
      if (infos[i].name == "weight_decay") hyperparams[i] = 0.07;
    }
    return hyperparams;
  }
};

TEST_P(WholeRulesTest, EveryTargetHasTheSameBits) {
  std::mt19937 random(TestSeed());
  for (const Shape& shape : ShapesOf(GetParam())) {
    for (int64_t step_count : {1, 2, 1000}) {
      const Parameter parameter = RandomParameter(GetParam(), shape, &random);
      const Result expected = Compute(PlainTarget(), GetParam(), hyperparams(),
                                      step_count, parameter);
      for (Target target : SupportedTargets()) {
        ASSERT_EQ(
            Compute(target, GetParam(), hyperparams(), step_count, parameter),
            expected)
            << TargetName(target) << " " << testing::PrintToString(shape);
      }
    }
  }
}

TEST_P(WholeRulesTest, StateMayBeUpdatedInPlace) {
  std::mt19937 random(TestSeed());
  for (const Shape& shape : ShapesOf(GetParam())) {
    const Parameter parameter = RandomParameter(GetParam(), shape, &random);
    for (Target target : SupportedTargets()) {
      const auto compute = [&](bool in_place) {
        return Compute(target, GetParam(), hyperparams(), 7, parameter,
                       in_place);
      };
      ASSERT_EQ(compute(true), compute(false))
          << TargetName(target) << " " << testing::PrintToString(shape);
    }
  }
}

TEST_P(WholeRulesTest, SpecialValuesHaveTheSameBitsAndOneNan) {
  std::mt19937 random(TestSeed());
  for (const Shape& shape : ShapesOf(GetParam())) {
    const size_t numel = NumelOf(shape);
    if (numel == 0) continue;
    for (uint32_t bits :
         {0xFFF12345u, 0x7F800000u, 0xFF800000u, 0x00000001u, 0x7F7FFFFFu}) {
      const float special = std::bit_cast<float>(bits);
      Parameter parameter = RandomParameter(GetParam(), shape, &random);
      parameter.gradient[random() % numel] = special;
      if (random() % 2 == 0) parameter.master[random() % numel] = special;
      for (auto& state : parameter.state) {
        if (state.empty() || random() % 2 == 0) continue;
        state[random() % state.size()] = std::abs(special);
      }
      const Result expected =
          Compute(PlainTarget(), GetParam(), hyperparams(), 7, parameter);
      for (const auto& array : expected.arrays) {
        for (uint32_t x : array) {
          if (std::isnan(std::bit_cast<float>(x))) {
            ASSERT_EQ(x, kCanonicalNan);
          }
        }
      }
      for (Target target : SupportedTargets()) {
        ASSERT_EQ(Compute(target, GetParam(), hyperparams(), 7, parameter),
                  expected)
            << TargetName(target) << " " << testing::PrintToString(shape) << " "
            << special;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, WholeRulesTest, testing::ValuesIn(AllKinds()),
                         [](const auto& kind) {
                           return std::string(InfoOf(kind.param).name);
                         });

}  // namespace
}  // namespace optstate::kernels::cpu
