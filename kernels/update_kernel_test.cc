// Tests the kernels of this CPU against torch's formula in double precision.

#include "kernels/update_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "kernels/reference/optimizer_reference.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

const UpdateKernel& KernelOf(const UpdateKernelKey& key) {
  return **FindUpdateKernel(key);
}

// A parameter and its state, updated by a kernel. Gradients are fp32.
class KernelRun {
 public:
  KernelRun(const Variant& variant, std::vector<float> master)
      : variant_(variant),
        kernel_(KernelOf({variant.kind, variant.options})),
        scalar_(InfoOf(variant.kind).scalar_initial),
        master_(std::move(master)),
        parameter_(master_.size()) {
    for (auto& state : state_) state.resize(master_.size());
  }

  void Step(const Hyperparams& hyperparams, const std::vector<float>& gradient,
            double gradient_factor = 1, double gradient_limit = 0) {
    ++step_count_;
    if (kernel_.advance != nullptr) {
      scalar_ = kernel_.advance(hyperparams, step_count_, scalar_);
    }
    const void* const gradients[] = {gradient.data()};
    TileView view;
    view.gradients = gradients;
    view.parameter = parameter_.data();
    view.master = master_.data();
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (HasStateArray(InfoOf(variant_.kind), k, variant_.options)) {
        view.state[k] = state_[k].data();
      }
    }
    view.numel = master_.size();
    UpdateInput input;
    input.hyperparams = hyperparams;
    input.step_count = step_count_;
    input.scalar = scalar_;
    input.gradient_factor = gradient_factor;
    input.gradient_limit = gradient_limit;
    kernel_.apply(kernel_.prepare(input), view);
  }

  const std::vector<float>& master() const { return master_; }
  std::vector<float>& state(int k) { return state_[k]; }
  void set_step_count(int64_t step_count) { step_count_ = step_count; }

 private:
  const Variant variant_;
  const UpdateKernel& kernel_;
  int64_t step_count_ = 0;
  double scalar_;
  std::vector<float> master_;
  std::vector<float> state_[kStateArraysMax];
  std::vector<float> parameter_;
};

// ------------------------------------------------------------------ accuracy

struct Scenario {
  std::string name;
  Variant variant;
  Hyperparams hyperparams;
};

void PrintTo(const Scenario& scenario, std::ostream* os) {
  *os << scenario.name;
}

std::vector<Scenario> AllScenarios() {
  std::vector<Scenario> scenarios;
  for (const Variant& variant : AllVariants()) {
    for (const auto& [name, hyperparams] : SettingsOf(variant)) {
      scenarios.push_back(
          {absl::StrCat(NameOf(variant), name), variant, hyperparams});
    }
  }
  return scenarios;
}

// Returns a learning rate that warms up and then falls.
Hyperparams Scheduled(Hyperparams hyperparams, int step) {
  hyperparams[kLr] *= step < 20 ? step / 20. : 1 - 0.5 * (step - 20) / 180.;
  return hyperparams;
}

struct Error {
  double largest = 0;
  double mean = 0;
};

// Measures without the worst in 512: where a sign (Lion) or a difference
// (centered RMSprop) cancels, chance decides whose rounding turns it.
Error ErrorOf(const std::vector<float>& values,
              const std::vector<double>& truth) {
  std::vector<double> differences;
  for (size_t i = 0; i < values.size(); ++i) {
    differences.push_back(std::abs(values[i] - truth[i]));
  }
  std::sort(differences.begin(), differences.end());
  differences.resize(differences.size() - differences.size() / 512);
  Error error;
  for (double difference : differences) {
    error.mean += difference / static_cast<double>(differences.size());
  }
  error.largest = differences.back();
  return error;
}

class AccuracyTest : public testing::TestWithParam<Scenario> {};

TEST_P(AccuracyTest, IsNeverWorseThanTorchsFormulaInFloat) {
  constexpr size_t kNumel = 4096;
  constexpr int kSteps = 200;
  const Scenario& scenario = GetParam();
  std::mt19937 random(TestSeed());
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-12, 3);
  std::vector<float> initial(kNumel);
  std::vector<float> scale(kNumel);
  for (float& x : initial) x = normal(random);
  for (float& x : scale) x = std::exp(exponent(random));

  const std::vector<double> initial_double(initial.begin(), initial.end());
  const auto [kind, options] = scenario.variant;
  OptimizerReference<double> truth(kind, options, initial_double);
  OptimizerReference<float> torch(kind, options, initial);
  KernelRun ours(scenario.variant, initial);
  std::vector<float> gradient(kNumel);
  for (int step = 1; step <= kSteps; ++step) {
    for (size_t i = 0; i < kNumel; ++i) {
      gradient[i] = (normal(random) + 0.3f) * scale[i];
    }
    const std::vector<double> gradient_double(gradient.begin(), gradient.end());
    const Hyperparams hyperparams = Scheduled(scenario.hyperparams, step);
    truth.Step(hyperparams, gradient_double);
    torch.Step(hyperparams, gradient);
    ours.Step(hyperparams, gradient);
  }
  const Error our_error = ErrorOf(ours.master(), truth.parameter());
  const Error torch_error = ErrorOf(torch.parameter(), truth.parameter());
  // Where rounding the parameter itself is all the error there is, the two are
  // equal but for chance: seen within 0.2% for the mean. The largest of so many
  // is chance above all (1.28 was seen); it is here to catch single outliers.
  EXPECT_LE(our_error.mean, 1.01 * torch_error.mean);
  EXPECT_LE(our_error.largest, 2 * torch_error.largest);
  std::cout << "mean_ratio " << our_error.mean / torch_error.mean << std::endl;
  RecordProperty("mean_ratio", absl::StrCat(our_error.mean / torch_error.mean));
  RecordProperty("largest_ratio",
                 absl::StrCat(our_error.largest / torch_error.largest));
}

INSTANTIATE_TEST_SUITE_P(Scenarios, AccuracyTest,
                         testing::ValuesIn(AllScenarios()),
                         [](const auto& scenario) {
                           return scenario.param.name;
                         });

// -------------------------------------------------------------- special values

// NaN, infinity and finiteness of every combination are as in torch.
class SpecialValuesTest : public testing::TestWithParam<Scenario> {};

enum class ValueClass { kFinite, kPlusInfinite, kMinusInfinite, kNotANumber };

ValueClass ClassOf(float value) {
  if (std::isnan(value)) return ValueClass::kNotANumber;
  if (std::isfinite(value)) return ValueClass::kFinite;
  return value > 0 ? ValueClass::kPlusInfinite : ValueClass::kMinusInfinite;
}

struct SpecialElements {
  std::vector<float> gradient, master, state[kStateArraysMax];
};

// Every combination of special values in the arrays that the variant has.
SpecialElements AllSpecialElements(const Variant& variant) {
  const float denormal = std::numeric_limits<float>::denorm_min();
  const std::vector<float> any = {0.0f,      -0.0f,      1.0f,  -1.0f,
                                  denormal,  1e-30f,     1e15f, 1e30f,
                                  kInfinity, -kInfinity, kNan,  1e20f};
  const std::vector<float> squares = {0,        denormal,  1,   1e30f,
                                      kLargest, kInfinity, kNan};
  std::vector<float> choices[kStateArraysMax];
  for (int k = 0; k < kStateArraysMax; ++k) {
    choices[k] = {0};
    if (!HasStateArray(InfoOf(variant.kind), k, variant.options)) continue;
    choices[k] = IsNeverNegative(variant.kind, k) ? squares : any;
  }
  SpecialElements all;
  for (float gradient : any) {
    for (float master : any) {
      for (float state0 : choices[0]) {
        for (float state1 : choices[1]) {
          for (float state2 : choices[2]) {
            all.gradient.push_back(gradient);
            all.master.push_back(master);
            all.state[0].push_back(state0);
            all.state[1].push_back(state1);
            all.state[2].push_back(state2);
          }
        }
      }
    }
  }
  return all;
}

// Returns whether torch's own result is an accident of rounding and ours is
// not.
bool IsAccident(const Variant& variant, const std::vector<float> state[3],
                size_t i) {
  // The accident is the square root of a difference that is below 0 by
  // rounding.
  if (variant.kind != OptimizerKind::kRmsprop) return false;
  if ((variant.options & rmsprop::kCentered) == 0) return false;
  return state[0][i] - state[2][i] * state[2][i] < 0;
}

TEST_P(SpecialValuesTest, AreOfTheSameClassAsTorchs) {
  const Variant& variant = GetParam().variant;
  const SpecialElements all = AllSpecialElements(variant);
  // RAdam is rectified from the sixth on.
  for (int step : {5, 9}) {
    OptimizerReference<float> torch(variant.kind, variant.options, all.master);
    KernelRun ours(variant, all.master);
    for (int k = 0; k < kStateArraysMax; ++k) {
      *torch.mutable_state(k) = all.state[k];
      ours.state(k) = all.state[k];
    }
    torch.set_step_count(step - 1);
    torch.Step(GetParam().hyperparams, all.gradient);
    ours.set_step_count(step - 1);
    ours.Step(GetParam().hyperparams, all.gradient);

    const std::vector<float> torch_state[] = {torch.state(0), torch.state(1),
                                              torch.state(2)};
    for (int k = -1; k < kStateArraysMax; ++k) {
      const auto& of_ours = k < 0 ? ours.master() : ours.state(k);
      const auto& of_torch = k < 0 ? torch.parameter() : torch.state(k);
      for (size_t i = 0; i < all.master.size(); ++i) {
        if (IsAccident(variant, torch_state, i)) continue;
        EXPECT_EQ(ClassOf(of_ours[i]), ClassOf(of_torch[i]))
            << "array " << k << " is " << of_ours[i] << ", in torch "
            << of_torch[i] << "; gradient " << all.gradient[i] << ", param "
            << all.master[i] << ", state " << all.state[0][i] << " "
            << all.state[1][i] << " " << all.state[2][i];
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, SpecialValuesTest,
                         testing::ValuesIn(AllScenarios()),
                         [](const auto& scenario) {
                           return scenario.param.name;
                         });

// ------------------------------------------------------------------ the rest

TEST(UpdateKernelTest, HugeSettingsLeaveElementsWithoutGradientAlone) {
  Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
  hyperparams[adam::kLr] = 1e300;
  hyperparams[adam::kEps] = 1e-300;
  hyperparams[adam::kWeightDecay] = 0;
  KernelRun run({OptimizerKind::kAdamW, 0}, {2});
  run.Step(hyperparams, {0});
  EXPECT_EQ(run.master()[0], 2);
}

TEST(UpdateKernelTest, GradientFactorScalesTheGradient) {
  for (const Variant& variant : AllVariants()) {
    const Hyperparams hyperparams = DefaultHyperparams(variant.kind);
    KernelRun scaled(variant, {2, 3});
    KernelRun plain(variant, {2, 3});
    scaled.Step(hyperparams, {64, -32}, /*gradient_factor=*/0.125);
    plain.Step(hyperparams, {8, -4});
    EXPECT_EQ(scaled.master(), plain.master());
    EXPECT_EQ(scaled.state(0), plain.state(0));
  }
}

TEST(UpdateKernelTest, GradientLimitCutsTheUnscaledGradient) {
  const Variant variant = {OptimizerKind::kSgd, 0};
  Hyperparams hyperparams = DefaultHyperparams(variant.kind);
  hyperparams[sgd::kLr] = 1;
  for (bool maximize : {false, true}) {
    hyperparams[sgd::kMaximize] = maximize ? 1 : 0;
    KernelRun run(variant, {0, 0, 0, 0});
    run.Step(hyperparams, {8, -8, 1, kNan}, /*gradient_factor=*/0.5,
             /*gradient_limit=*/3);
    const float sign = maximize ? 1 : -1;
    EXPECT_EQ(run.master()[0], sign * 3);
    EXPECT_EQ(run.master()[1], sign * -3);
    EXPECT_EQ(run.master()[2], sign * 0.5f);
    EXPECT_TRUE(std::isnan(run.master()[3]));
  }
}

TEST(FindUpdateKernelTest, UnknownKeysAreNamed) {
  UpdateKernelKey key;
  key.optimizer = static_cast<OptimizerKind>(99);
  const absl::Status no_optimizer = FindUpdateKernel(key).status();
  EXPECT_EQ(no_optimizer.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(no_optimizer.message(),
            "no update kernel for optimizer 99 (invalid) with options 0, "
            "gradient float32 (1), parameter float32 (1), state format 1, "
            "master float32");
  key = UpdateKernelKey();
  key.options = 1;
  key.parameter = static_cast<DType>(7);
  EXPECT_EQ(
      FindUpdateKernel(key).status().message(),
      "no update kernel for optimizer 2 (adamw) with options 1, gradient "
      "float32 (1), parameter invalid (7), state format 1, master float32");
}

}  // namespace
}  // namespace optstate::kernels
