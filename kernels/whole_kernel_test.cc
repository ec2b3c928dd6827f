// Tests the accuracy of the whole-parameter kernels of this CPU against torch's
// formula in double.

#include "kernels/whole_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/reference/whole_reference.h"
#include "kernels/test_seed.h"
#include "kernels/whole_harness.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

std::vector<WholeSetting> LambSettings() {
  constexpr OptimizerKind kKind = OptimizerKind::kLamb;
  return {
      SettingOf("Lamb", kKind, {}),
      SettingOf("LambDecay", kKind,
                {{adam::kLr, 1e-2}, {adam::kWeightDecay, 0.1}}),
      SettingOf("LambLowBetas", kKind,
                {{adam::kBeta1, 0.3}, {adam::kBeta2, 0.4}}),
  };
}

std::vector<WholeSetting> AdafactorSettings() {
  constexpr OptimizerKind kKind = OptimizerKind::kAdafactor;
  return {
      SettingOf("Adafactor", kKind, {}),
      SettingOf("AdafactorDecay", kKind,
                {{adafactor::kLr, 0.1},
                 {adafactor::kBeta2Decay, -0.5},
                 {adafactor::kEps1, 1e-3},
                 {adafactor::kWeightDecay, 0.05}}),
      SettingOf("AdafactorNoClipping", kKind,
                {{adafactor::kEps1, 0},
                 {adafactor::kEps2, 10},
                 {adafactor::kD, 1e3}}),
  };
}

std::vector<WholeSetting> MuonSettings() {
  constexpr OptimizerKind kKind = OptimizerKind::kMuon;
  return {
      SettingOf("Muon", kKind, {}),
      SettingOf("MuonMatchRms", kKind,
                {{muon::kMomentum, 0.4}, {muon::kAdjustLr, 1}}),
      SettingOf("MuonNoNesterov", kKind,
                {{muon::kNesterov, 0},
                 {muon::kWeightDecay, 0},
                 {muon::kNsSteps, 4},
                 {muon::kAdjustLr, 2}}),
  };
}

// Returns a learning rate that warms up and then falls.
Hyperparams Scheduled(Hyperparams hyperparams, int step) {
  hyperparams[kLr] *= step < 20 ? step / 20. : 1 - 0.5 * (step - 20) / 180.;
  return hyperparams;
}

double MeanError(const std::vector<float>& values,
                 const std::vector<double>& truth) {
  double sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    sum += std::abs(values[i] - truth[i]);
  }
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double LargestError(const std::vector<float>& values,
                    const std::vector<double>& truth) {
  double largest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    largest = std::max(largest, std::abs(values[i] - truth[i]));
  }
  return largest;
}

double LargestOf(const std::vector<double>& values) {
  double largest = 0;
  for (double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

class AccuracyTest : public testing::TestWithParam<Scenario> {};

// A parameter that was updated three ways.
struct Runs {
  Runs(const Scenario& scenario, std::mt19937* random)
      : Runs(scenario, RandomMaster(NumelOf(scenario.shape), random)) {
    constexpr int kSteps = 150;
    GradientSource gradients(ours.master().size(), random);
    for (int step = 1; step <= kSteps; ++step) {
      const std::vector<float> gradient = gradients.Next();
      const Hyperparams scheduled = Scheduled(scenario.hyperparams, step);
      truth.Step(scheduled, Doubles(gradient));
      torch.Step(scheduled, gradient);
      ours.Step(scheduled, gradient);
    }
  }

  WholeReference<double> truth;
  WholeReference<float> torch;
  KernelRun ours;

 private:
  Runs(const Scenario& scenario, const std::vector<float>& initial)
      : truth(scenario.kind, scenario.shape, Doubles(initial)),
        torch(scenario.kind, scenario.shape, initial),
        ours(scenario.kind, scenario.shape, initial) {}
};

TEST_P(AccuracyTest, IsNeverWorseThanTorchsFormulaInFloat) {
  const Scenario& scenario = GetParam();
  std::mt19937 random(TestSeed());
  const size_t numel = NumelOf(scenario.shape);
  // Where rounding the parameter is all the error there is, the two are equal
  // but for chance, which many elements even out.
  constexpr size_t kManyElements = 20'000;
  const bool is_large = numel > 1000;
  const size_t repeats = is_large ? kManyElements / numel + 1 : 1;
  double our_error = 0;
  double torch_error = 0;
  for (size_t repeat = 0; repeat < repeats; ++repeat) {
    const Runs runs(scenario, &random);
    const std::vector<double>& truth = runs.truth.parameter();
    our_error += MeanError(runs.ours.master(), truth);
    torch_error += MeanError(runs.torch.parameter(), truth);
    EXPECT_LE(LargestError(runs.ours.master(), truth), 2e-5 * LargestOf(truth));
    for (int k = 0; k < kStateArraysMax; ++k) {
      const std::vector<double>& state = runs.truth.state(k);
      const std::vector<float>& our_state = runs.ours.state(k);
      if (our_state.empty()) continue;
      ASSERT_EQ(our_state.size(), state.size());
      // An average of few elements may cancel: then torch's does too.
      EXPECT_LE(LargestError(our_state, state),
                std::max(1e-6 * LargestOf(state),
                         8 * LargestError(runs.torch.state(k), state)));
    }
  }
  if (!is_large) return;
  EXPECT_LE(our_error, 1.015 * torch_error);
  std::cout << "mean_ratio " << our_error / torch_error << std::endl;
  RecordProperty("mean_ratio", absl::StrCat(our_error / torch_error));
}

INSTANTIATE_TEST_SUITE_P(Lamb, AccuracyTest,
                         testing::ValuesIn(ScenariosOf(LambSettings())),
                         [](const auto& scenario) {
                           return scenario.param.name;
                         });

INSTANTIATE_TEST_SUITE_P(Adafactor, AccuracyTest,
                         testing::ValuesIn(ScenariosOf(AdafactorSettings())),
                         [](const auto& scenario) {
                           return scenario.param.name;
                         });

// The rounding to bfloat16 is random in effect: two sums that add the products
// in another order drift apart; each stays as near to the truth as the other.
class MuonAccuracyTest : public testing::TestWithParam<Scenario> {};

double Distance(const std::vector<float>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

TEST_P(MuonAccuracyTest, IsAsNearToTheTruthAsTorchInBFloat16) {
  const auto& [name, kind, hyperparams, shape] = GetParam();
  constexpr int kSteps = 50;
  std::mt19937 random(TestSeed());
  const size_t numel = NumelOf(shape);
  const std::vector<float> initial = RandomMaster(numel, &random);
  WholeReference<double> truth(kind, shape, Doubles(initial));
  WholeReference<float> torch(kind, shape, initial);
  KernelRun ours(kind, shape, initial);
  GradientSource gradients(numel, &random);
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<float> gradient = gradients.Next();
    truth.Step(hyperparams, Doubles(gradient));
    torch.Step(hyperparams, gradient);
    ours.Step(hyperparams, gradient);
  }
  const double our_error = Distance(ours.master(), truth.parameter());
  const double torch_error = Distance(torch.parameter(), truth.parameter());
  // The distance is at least a little, for parameters without elements.
  const double way = Distance(initial, truth.parameter()) + 1e-300;
  const double apart = Distance(ours.master(), Doubles(torch.parameter()));
  std::cout << "error/way " << our_error / way << " torch " << torch_error / way
            << " apart " << apart / way << std::endl;
  RecordProperty("error_to_way", absl::StrCat(our_error / way));
  RecordProperty("torch_error_to_way", absl::StrCat(torch_error / way));
  if (numel > 1000) {
    EXPECT_LE(our_error, 1.1 * torch_error);
  }
  // A small matrix may have a singular value near where the steps' polynomial
  // is steep.
  const double limit = numel > 1000 ? 0.01 : 0.1;
  EXPECT_LE(our_error, limit * way);
  EXPECT_LE(apart, limit * way);
  EXPECT_LE(LargestError(ours.state(0), truth.state(0)),
            2e-6 * LargestOf(truth.state(0)));
}

INSTANTIATE_TEST_SUITE_P(Muon, MuonAccuracyTest,
                         testing::ValuesIn(ScenariosOf(MuonSettings())),
                         [](const auto& scenario) {
                           return scenario.param.name;
                         });

TEST(FindWholeKernelTest, HasNoneOfElementWiseOptimizers) {
  EXPECT_EQ(FindWholeKernel(OptimizerKind::kAdamW), nullptr);
  EXPECT_EQ(FindWholeKernel(static_cast<OptimizerKind>(99)), nullptr);
  EXPECT_NE(FindWholeKernel(OptimizerKind::kLamb), nullptr);
}

TEST(WholeKernelTest, AreThoseOfOptimizersThatAreNotSeparable) {
  for (const OptimizerInfo& info : Optimizers()) {
    EXPECT_EQ(FindWholeKernel(info.kind) == nullptr, info.is_separable)
        << info.name;
  }
}

}  // namespace
}  // namespace optstate::kernels
