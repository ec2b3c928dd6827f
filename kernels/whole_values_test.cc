// Tests what the whole-parameter kernels of this CPU make of special values and
// of parameters and gradients of zeros.

#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/whole_reference.h"
#include "kernels/test_seed.h"
#include "kernels/whole_harness.h"
#include "kernels/whole_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<WholeSetting> AllDefaults() {
  std::vector<WholeSetting> settings;
  for (const OptimizerInfo& info : Optimizers()) {
    if (FindWholeKernel(info.kind) == nullptr) continue;
    settings.push_back(SettingOf(std::string(info.name), info.kind, {}));
  }
  return settings;
}

class SpecialValuesTest : public testing::TestWithParam<Scenario> {};

// The reference in float decides, of both, what is finite.
TEST_P(SpecialValuesTest, AreWhereTorchHasThem) {
  const auto& [name, kind, hyperparams, shape] = GetParam();
  std::mt19937 random(TestSeed());
  const size_t numel = NumelOf(shape);
  for (float special : {kNan, kInfinity, -kInfinity}) {
    const std::vector<float> initial = RandomMaster(numel, &random);
    WholeReference<float> torch(kind, shape, initial);
    KernelRun ours(kind, shape, initial);
    GradientSource gradients(numel, &random);
    for (int step = 1; step <= 4; ++step) {
      std::vector<float> gradient = gradients.Next();
      if (step == 2 && numel > 0) gradient[numel / 2] = special;
      torch.Step(hyperparams, gradient);
      ours.Step(hyperparams, gradient);
    }
    for (size_t i = 0; i < numel; ++i) {
      ASSERT_EQ(std::isnan(ours.master()[i]), std::isnan(torch.parameter()[i]))
          << i << " after a gradient of " << special;
    }
  }
}

TEST_P(SpecialValuesTest, NoGradientLeavesAllButTheDecay) {
  const auto& [name, kind, hyperparams, shape] = GetParam();
  std::mt19937 random(TestSeed());
  const size_t numel = NumelOf(shape);
  const std::vector<float> initial = RandomMaster(numel, &random);
  WholeReference<double> truth(kind, shape, Doubles(initial));
  KernelRun ours(kind, shape, initial);
  const std::vector<float> zeros(numel);
  for (int step = 1; step <= 3; ++step) {
    truth.Step(hyperparams, Doubles(zeros));
    ours.Step(hyperparams, zeros);
  }
  for (size_t i = 0; i < numel; ++i) {
    EXPECT_NEAR(ours.master()[i], truth.parameter()[i],
                3e-7 * std::abs(truth.parameter()[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, SpecialValuesTest,
                         testing::ValuesIn(ScenariosOf(AllDefaults())),
                         [](const auto& scenario) {
                           return scenario.param.name;
                         });

TEST(LambTest, TrustIsOneWhereANormIsZero) {
  Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kLamb);
  hyperparams[adam::kLr] = 0.25;
  hyperparams[adam::kEps] = 0;
  KernelRun run(OptimizerKind::kLamb, {2}, {0, 0});
  run.Step(hyperparams, {4, -2});
  EXPECT_EQ(run.master(), (std::vector<float>{-0.25, 0.25}));
}

}  // namespace
}  // namespace optstate::kernels
