// Tests the whole-parameter kernels of this CPU against torch's formula in
// double.

#include "kernels/whole_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/reference/whole_reference.h"
#include "kernels/test_seed.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate {
namespace {

using Shape = std::vector<int64_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct FreeDeleter {
  void operator()(float* array) const { std::free(array); }
};

// A parameter and its state, updated by a kernel.
class KernelRun {
 public:
  KernelRun(OptimizerKind kind, Shape shape, std::vector<float> master)
      : kernel_(*FindWholeKernel(kind)),
        shape_(std::move(shape)),
        master_(std::move(master)) {
    for (int k = 0; k < kStateArraysMax; ++k) {
      state_[k].resize(static_cast<size_t>(k) < InfoOf(kind).state_arrays.size()
                           ? StateElements(InfoOf(kind), k, shape_)
                           : 0);
    }
    const size_t bytes = kernel_.workspace_elements(shape_) * sizeof(float);
    workspace_.reset(static_cast<float*>(
        std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64))));
  }

  void Step(const Hyperparams& hyperparams,
            const std::vector<float>& gradient) {
    UpdateInput input;
    input.hyperparams = hyperparams;
    input.step_count = ++step_count_;
    std::vector<float> new_master(master_.size());
    std::vector<float> new_state[kStateArraysMax];
    WholeView view;
    view.shape = shape_;
    view.numel = master_.size();
    view.gradient = gradient.data();
    view.master = master_.data();
    view.new_master = new_master.data();
    view.workspace = workspace_.get();
    for (int k = 0; k < kStateArraysMax; ++k) {
      new_state[k].resize(state_[k].size());
      view.state[k] = state_[k].data();
      view.new_state[k] = new_state[k].data();
    }
    kernel_.compute(input, view);
    master_ = std::move(new_master);
    for (int k = 0; k < kStateArraysMax; ++k) {
      state_[k] = std::move(new_state[k]);
    }
  }

  const std::vector<float>& master() const { return master_; }
  const std::vector<float>& state(int k) const { return state_[k]; }

 private:
  const WholeKernel& kernel_;
  const Shape shape_;
  int64_t step_count_ = 0;
  std::vector<float> master_;
  std::vector<float> state_[kStateArraysMax];
  std::unique_ptr<float, FreeDeleter> workspace_;
};

struct Scenario {
  std::string name;
  OptimizerKind kind;
  Hyperparams hyperparams;
  Shape shape;
};

void PrintTo(const Scenario& scenario, std::ostream* os) {
  *os << scenario.name;
}

struct Setting {
  std::string name;
  OptimizerKind kind;
  Hyperparams hyperparams;
};

// Returns the defaults with some values changed.
Setting SettingOf(const std::string& name, OptimizerKind kind,
                  std::vector<std::pair<size_t, double>> changes) {
  Setting setting = {name, kind, DefaultHyperparams(kind)};
  for (const auto& [index, value] : changes) setting.hyperparams[index] = value;
  return setting;
}

std::vector<Setting> LambSettings() {
  constexpr OptimizerKind kKind = OptimizerKind::kLamb;
  return {
      SettingOf("Lamb", kKind, {}),
      SettingOf("LambDecay", kKind,
                {{adam::kLr, 1e-2}, {adam::kWeightDecay, 0.1}}),
      SettingOf("LambLowBetas", kKind,
                {{adam::kBeta1, 0.3}, {adam::kBeta2, 0.4}}),
  };
}

std::vector<Setting> AdafactorSettings() {
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

std::vector<Setting> MuonSettings() {
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

const std::vector<Shape>& AllShapes() {
  static const std::vector<Shape> kShapes = {
      {},       {0},      {1},       {17},       {4097}, {3, 5},
      {64, 65}, {65, 64}, {2, 3, 5}, {128, 300}, {3, 0}, {4, 1}};
  return kShapes;
}

std::string NameOfShape(const Shape& shape) {
  return shape.empty() ? "Scalar" : absl::StrJoin(shape, "x");
}

std::vector<Scenario> ScenariosOf(const std::vector<Setting>& settings) {
  std::vector<Scenario> scenarios;
  for (const Setting& setting : settings) {
    const WholeKernel& kernel = *FindWholeKernel(setting.kind);
    for (const Shape& shape : AllShapes()) {
      if (!kernel.check_shape(shape).ok()) continue;
      scenarios.push_back({absl::StrCat(setting.name, "_", NameOfShape(shape)),
                           setting.kind, setting.hyperparams, shape});
    }
  }
  return scenarios;
}

// Returns a learning rate that warms up and then falls.
Hyperparams Scheduled(Hyperparams hyperparams, int step) {
  hyperparams[kLr] *= step < 20 ? step / 20. : 1 - 0.5 * (step - 20) / 180.;
  return hyperparams;
}

// Gradients with a mean, each element at a magnitude of its own.
class Gradients {
 public:
  Gradients(size_t numel, std::mt19937* random)
      : random_(random), scale_(numel) {
    std::uniform_real_distribution<float> exponent(-8, 3);
    for (float& x : scale_) x = std::exp(exponent(*random_));
  }

  std::vector<float> Next() {
    std::vector<float> gradient(scale_.size());
    for (size_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = (normal_(*random_) + 0.3f) * scale_[i];
    }
    return gradient;
  }

 private:
  std::mt19937* const random_;
  std::normal_distribution<float> normal_;
  std::vector<float> scale_;
};

std::vector<float> RandomMaster(size_t numel, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> master(numel);
  for (float& x : master) x = normal(*random);
  return master;
}

std::vector<double> Doubles(const std::vector<float>& values) {
  return {values.begin(), values.end()};
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

// ------------------------------------------------------------------ accuracy

class AccuracyTest : public testing::TestWithParam<Scenario> {};

// A parameter that was updated three ways.
struct Runs {
  Runs(const Scenario& scenario, std::mt19937* random)
      : Runs(scenario, RandomMaster(NumelOf(scenario.shape), random)) {
    constexpr int kSteps = 150;
    Gradients gradients(ours.master().size(), random);
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
  Gradients gradients(numel, &random);
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

// -------------------------------------------------------------- special values

std::vector<Setting> AllDefaults() {
  std::vector<Setting> settings;
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
    Gradients gradients(numel, &random);
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

// ------------------------------------------------------------------ the rest

TEST(LambTest, TrustIsOneWhereANormIsZero) {
  Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kLamb);
  hyperparams[adam::kLr] = 0.25;
  hyperparams[adam::kEps] = 0;
  KernelRun run(OptimizerKind::kLamb, {2}, {0, 0});
  run.Step(hyperparams, {4, -2});
  EXPECT_EQ(run.master(), (std::vector<float>{-0.25, 0.25}));
}

// Returns the eigenvalues of a symmetric matrix, by Jacobi's rotations.
std::vector<double> Eigenvalues(std::vector<double> matrix, size_t size) {
  const auto at = [&](size_t i, size_t j) -> double& {
    return matrix[i * size + j];
  };
  for (int sweep = 0; sweep < 12; ++sweep) {
    for (size_t p = 0; p < size; ++p) {
      for (size_t q = p + 1; q < size; ++q) {
        if (std::abs(at(p, q)) < 1e-15) continue;
        const double angle =
            0.5 * std::atan2(2 * at(p, q), at(q, q) - at(p, p));
        const double c = std::cos(angle);
        const double s = std::sin(angle);
        for (size_t k = 0; k < size; ++k) {
          const double old_p = at(k, p);
          at(k, p) = c * old_p - s * at(k, q);
          at(k, q) = s * old_p + c * at(k, q);
        }
        for (size_t k = 0; k < size; ++k) {
          const double old_p = at(p, k);
          at(p, k) = c * old_p - s * at(q, k);
          at(q, k) = s * old_p + c * at(q, k);
        }
      }
    }
  }
  std::vector<double> values;
  for (size_t k = 0; k < size; ++k) values.push_back(at(k, k));
  std::sort(values.begin(), values.end());
  return values;
}

// Returns the singular values, ascending.
std::vector<double> SingularValues(const std::vector<float>& matrix,
                                   size_t rows, size_t columns) {
  std::vector<double> gram(rows * rows);
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < rows; ++j) {
      for (size_t k = 0; k < columns; ++k) {
        gram[i * rows + j] += static_cast<double>(matrix[i * columns + k]) *
                              static_cast<double>(matrix[j * columns + k]);
      }
    }
  }
  std::vector<double> values = Eigenvalues(std::move(gram), rows);
  for (double& value : values) value = std::sqrt(std::max(0.0, value));
  return values;
}

// The coefficients bring singular values above 1/256 or so of the norm to
// [0.68, 1.13] in five steps.
TEST(MuonTest, UpdatesAreOrthogonalAsTorchs) {
  Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kMuon);
  hyperparams[muon::kLr] = 1;
  hyperparams[muon::kWeightDecay] = 0;
  std::mt19937 random(TestSeed());
  for (const Shape& shape : {Shape{48, 128}, Shape{64, 65}, Shape{128, 300}}) {
    const size_t rows = static_cast<size_t>(shape[0]);
    const size_t columns = static_cast<size_t>(shape[1]);
    const std::vector<float> zeros(rows * columns);
    const std::vector<float> gradient = RandomMaster(zeros.size(), &random);
    WholeReference<float> torch(OptimizerKind::kMuon, shape, zeros);
    KernelRun ours(OptimizerKind::kMuon, shape, zeros);
    torch.Step(hyperparams, gradient);
    ours.Step(hyperparams, gradient);
    const auto of_torch = SingularValues(torch.parameter(), rows, columns);
    const auto of_ours = SingularValues(ours.master(), rows, columns);
    EXPECT_NEAR(of_ours.front(), of_torch.front(), 0.02);
    EXPECT_NEAR(of_ours.back(), of_torch.back(), 0.02);
    EXPECT_LT(of_ours.back(), 1.25);
    if (rows * 2 < columns) {
      EXPECT_GT(of_ours.front(), 0.6);
    }
    std::cout << of_ours.front() << " to " << of_ours.back() << ", torch "
              << of_torch.front() << " to " << of_torch.back() << std::endl;
  }
}

// Nothing here depends on the order of sums, so that bfloat16's rounding is the
// same to the bit.
TEST(MuonTest, WithoutStepsTheUpdateIsWhatTorchNormalises) {
  std::mt19937 random(TestSeed());
  for (double eps : {1e-7, 1e3}) {
    Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kMuon);
    hyperparams[muon::kLr] = 1;
    hyperparams[muon::kWeightDecay] = 0;
    hyperparams[muon::kEps] = eps;
    hyperparams[muon::kNsSteps] = 0;
    const Shape shape = {40, 33};
    const std::vector<float> zeros(NumelOf(shape));
    const std::vector<float> gradient = RandomMaster(zeros.size(), &random);
    WholeReference<float> torch(OptimizerKind::kMuon, shape, zeros);
    KernelRun ours(OptimizerKind::kMuon, shape, zeros);
    torch.Step(hyperparams, gradient);
    ours.Step(hyperparams, gradient);
    size_t different = 0;
    for (size_t i = 0; i < zeros.size(); ++i) {
      different += ours.master()[i] != torch.parameter()[i];
    }
    // The gradient may lie on the edge between two bfloat16, and torch's
    // weight between two floats.
    EXPECT_LE(different, zeros.size() / 100);
  }
}

TEST(MuonTest, StepsEndHoweverManyAreAsked) {
  Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kMuon);
  hyperparams[muon::kNsSteps] = 1e300;
  KernelRun run(OptimizerKind::kMuon, {2, 3}, {1, 2, 3, 4, 5, 6});
  run.Step(hyperparams, {1, 0, 0, 0, 1, 0});
  EXPECT_TRUE(std::isfinite(run.master()[0]));
}

TEST(MuonTest, TakesMatricesOnly) {
  const WholeKernel& kernel = *FindWholeKernel(OptimizerKind::kMuon);
  EXPECT_TRUE(kernel.check_shape({3, 5}).ok());
  const absl::Status status = kernel.check_shape({2, 3, 5});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "Muon only supports 2D parameters whereas we found a parameter "
            "with size: torch.Size([2, 3, 5])");
}

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
}  // namespace optstate
