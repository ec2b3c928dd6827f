#include "proto/types/optimizer.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace optstate {
namespace {

using enum HyperparamRange;

constexpr HyperparamInfo Lr(double default_value) {
  return {"lr", default_value, kAny, "learning rate"};
}
constexpr HyperparamInfo Beta1() {
  return {"betas.0", 0.9, kUnit, "beta parameter at index 0"};
}
constexpr HyperparamInfo Beta2(double default_value) {
  return {"betas.1", default_value, kUnit, "beta parameter at index 1"};
}
constexpr HyperparamInfo Eps(double default_value) {
  return {"eps", default_value, kAny, "epsilon value"};
}
constexpr HyperparamInfo WeightDecay(double default_value) {
  return {"weight_decay", default_value, kNotNegative, "weight_decay value"};
}
constexpr HyperparamInfo Momentum(double default_value) {
  return {"momentum", default_value, kNotNegative, "momentum value"};
}
constexpr HyperparamInfo Flag(absl::string_view name, double default_value) {
  return {name, default_value, kFlag, name};
}
constexpr HyperparamInfo kMaximizeInfo = Flag("maximize", 0);

constexpr HyperparamInfo kAdamHyperparams[] = {
    Lr(1e-3), Beta1(), Beta2(0.999), Eps(1e-8), WeightDecay(0), kMaximizeInfo};
constexpr HyperparamInfo kAdamWHyperparams[] = {
    Lr(1e-3),  Beta1(),           Beta2(0.999),
    Eps(1e-8), WeightDecay(1e-2), kMaximizeInfo};
constexpr HyperparamInfo kLambHyperparams[] = {
    Lr(1e-3), Beta1(), Beta2(0.999), Eps(1e-6), WeightDecay(0), kMaximizeInfo};
constexpr absl::string_view kAdamOptions[] = {"amsgrad"};

constexpr HyperparamInfo kSgdHyperparams[] = {
    Lr(1e-3),       Momentum(0),         {"dampening", 0, kAny, "dampening"},
    WeightDecay(0), Flag("nesterov", 0), kMaximizeInfo};
constexpr absl::string_view kSgdOptions[] = {"momentum"};

constexpr HyperparamInfo kAdagradHyperparams[] = {
    Lr(1e-2),
    {"lr_decay", 0, kAny, "lr_decay value"},
    WeightDecay(0),
    {"initial_accumulator_value", 0, kNotNegative,
     "initial_accumulator_value value"},
    Eps(1e-10),
    kMaximizeInfo};

constexpr HyperparamInfo kRmspropHyperparams[] = {
    Lr(1e-2),    {"alpha", 0.99, kNotNegative, "alpha value"},
    Eps(1e-8),   WeightDecay(0),
    Momentum(0), kMaximizeInfo};
constexpr absl::string_view kRmspropOptions[] = {"momentum", "centered"};

constexpr HyperparamInfo kLionHyperparams[] = {Lr(1e-4), Beta1(), Beta2(0.99),
                                               WeightDecay(0), kMaximizeInfo};

constexpr HyperparamInfo kNadamHyperparams[] = {
    Lr(2e-3),
    Beta1(),
    Beta2(0.999),
    Eps(1e-8),
    WeightDecay(0),
    {"momentum_decay", 4e-3, kAny, "momentum_decay value"},
    Flag("decoupled_weight_decay", 0),
    kMaximizeInfo};
constexpr HyperparamInfo kRadamHyperparams[] = {
    Lr(1e-3),     Beta1(),        Beta2(0.999),
    Eps(1e-8),    WeightDecay(0), Flag("decoupled_weight_decay", 0),
    kMaximizeInfo};

// A negative eps.0 stands for None, the dtype's own epsilon.
constexpr HyperparamInfo kAdafactorHyperparams[] = {
    Lr(1e-2),
    {"beta2_decay", -0.8, kNotPositive, "beta2_decay"},
    {"eps.0", -1, kAny, "epsilon1"},
    {"eps.1", 1e-3, kAny, "epsilon2"},
    {"d", 1, kNotZero, "clipping threshold d"},
    WeightDecay(0),
    kMaximizeInfo};

constexpr HyperparamInfo kMuonHyperparams[] = {
    Lr(1e-3),
    WeightDecay(0.1),
    Momentum(0.95),
    Flag("nesterov", 1),
    {"ns_coefficients.0", 3.4445, kAny, "ns_coefficients"},
    {"ns_coefficients.1", -4.7750, kAny, "ns_coefficients"},
    {"ns_coefficients.2", 2.0315, kAny, "ns_coefficients"},
    Eps(1e-7),
    {"ns_steps", 5, kAny, "ns_steps"},
    {"adjust_lr_fn", 0, kNotNegative, "adjust_lr_fn"}};

// Makes muon's checks beyond ranges, with torch's messages.
absl::Status CheckMuon(const Hyperparams& hyperparams) {
  if (hyperparams[muon::kNsSteps] >= 100) {
    return absl::InvalidArgumentError(
        absl::StrCat("Number of steps must be less than 100, ns_steps is: ",
                     hyperparams[muon::kNsSteps]));
  }
  const double adjust_lr = hyperparams[muon::kAdjustLr];
  if (adjust_lr != 0 && adjust_lr != 1 && adjust_lr != 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Adjust learning rate function ", adjust_lr, " is not supported"));
  }
  return absl::OkStatus();
}

constexpr OptimizerInfo kOptimizers[] = {
    {.kind = OptimizerKind::kAdam,
     .name = "adam",
     .hyperparams = kAdamHyperparams,
     .state_arrays = adam::kArrays,
     .options = kAdamOptions,
     .maximize = adam::kMaximize},
    {.kind = OptimizerKind::kAdamW,
     .name = "adamw",
     .hyperparams = kAdamWHyperparams,
     .state_arrays = adam::kArrays,
     .options = kAdamOptions,
     .maximize = adam::kMaximize},
    {.kind = OptimizerKind::kSgd,
     .name = "sgd",
     .hyperparams = kSgdHyperparams,
     .state_arrays = sgd::kArrays,
     .options = kSgdOptions,
     .maximize = sgd::kMaximize},
    {.kind = OptimizerKind::kAdagrad,
     .name = "adagrad",
     .hyperparams = kAdagradHyperparams,
     .state_arrays = adagrad::kArrays,
     .maximize = adagrad::kMaximize},
    {.kind = OptimizerKind::kRmsprop,
     .name = "rmsprop",
     .hyperparams = kRmspropHyperparams,
     .state_arrays = rmsprop::kArrays,
     .options = kRmspropOptions,
     .maximize = rmsprop::kMaximize},
    {.kind = OptimizerKind::kLion,
     .name = "lion",
     .hyperparams = kLionHyperparams,
     .state_arrays = lion::kArrays,
     .maximize = lion::kMaximize},
    {.kind = OptimizerKind::kNadam,
     .name = "nadam",
     .hyperparams = kNadamHyperparams,
     .state_arrays = adam::kMoments,
     .scalar = "mu_product",
     .scalar_initial = 1,
     .maximize = nadam::kMaximize},
    {.kind = OptimizerKind::kRadam,
     .name = "radam",
     .hyperparams = kRadamHyperparams,
     .state_arrays = adam::kMoments,
     .maximize = radam::kMaximize},
    {.kind = OptimizerKind::kLamb,
     .name = "lamb",
     .hyperparams = kLambHyperparams,
     .state_arrays = adam::kMoments,
     .is_separable = false,
     .maximize = adam::kMaximize},
    {.kind = OptimizerKind::kAdafactor,
     .name = "adafactor",
     .hyperparams = kAdafactorHyperparams,
     .state_arrays = adafactor::kArrays,
     .is_separable = false,
     .maximize = adafactor::kMaximize},
    {.kind = OptimizerKind::kMuon,
     .name = "muon",
     .hyperparams = kMuonHyperparams,
     .state_arrays = muon::kArrays,
     .is_separable = false,
     .check = &CheckMuon},
};

bool IsInRange(HyperparamRange range, double value) {
  if (!std::isfinite(value)) return false;
  switch (range) {
    case kAny:
      return true;
    case kNotNegative:
      return value >= 0;
    case kUnit:
      return value >= 0 && value < 1;
    case kFlag:
      return value == 0 || value == 1;
    case kNotPositive:
      return value <= 0;
    case kNotZero:
      return value != 0;
  }
  return false;
}

}  // namespace

absl::Span<const OptimizerInfo> Optimizers() { return kOptimizers; }

const OptimizerInfo* FindOptimizer(uint32_t kind) {
  for (const OptimizerInfo& info : kOptimizers) {
    if (static_cast<uint32_t>(info.kind) == kind) return &info;
  }
  return nullptr;
}

const OptimizerInfo& InfoOf(OptimizerKind kind) {
  return kOptimizers[static_cast<size_t>(kind) - 1];  // they count from 1
}

uint64_t StateElements(const OptimizerInfo& info, int index,
                       absl::Span<const int64_t> shape) {
  uint64_t numel = 1;
  for (const int64_t size : shape) numel *= static_cast<uint64_t>(size);
  const StateExtent extent =
      static_cast<size_t>(index) < info.state_arrays.size()
          ? info.state_arrays[static_cast<size_t>(index)].extent
          : StateExtent::kElements;
  if (extent == StateExtent::kElements || numel == 0) return numel;
  if (shape.size() < 2) return extent == StateExtent::kVector ? numel : 0;
  const auto rows = static_cast<uint64_t>(shape[shape.size() - 2]);
  const auto columns = static_cast<uint64_t>(shape[shape.size() - 1]);
  switch (extent) {
    case StateExtent::kRows:
      return numel / columns;
    case StateExtent::kColumns:
      return numel / rows;
    default:
      return 0;
  }
}

bool OptimizerInfo::has_prefixes() const {
  return std::any_of(state_arrays.begin(), state_arrays.end(),
                     [](const StateArrayInfo& array) {
                       return array.extent != StateExtent::kElements;
                     });
}

bool HasStateArray(const OptimizerInfo& info, int index, uint32_t options) {
  if (static_cast<size_t>(index) >= info.state_arrays.size()) return false;
  const uint32_t option = info.state_arrays[static_cast<size_t>(index)].option;
  return option == 0 || (options & option) != 0;
}

bool IsNeverNegative(OptimizerKind kind, int index) {
  return (NeverNegativeBits(InfoOf(kind).state_arrays) >> index & 1) != 0;
}

Hyperparams DefaultHyperparams(OptimizerKind kind) {
  Hyperparams hyperparams;
  const auto infos = InfoOf(kind).hyperparams;
  for (size_t i = 0; i < infos.size(); ++i) {
    hyperparams[i] = infos[i].default_value;
  }
  return hyperparams;
}

absl::Status Validate(OptimizerKind kind, const Hyperparams& hyperparams) {
  const auto infos = InfoOf(kind).hyperparams;
  for (size_t i = 0; i < kHyperparamsMax; ++i) {
    if (i >= infos.size()) {
      if (hyperparams[i] == 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(InfoOf(kind).name, " has ", infos.size(),
                       " hyperparameters, number ", i, " is set"));
    }
    if (IsInRange(infos[i].range, hyperparams[i])) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("Invalid ", infos[i].called, ": ", hyperparams[i]));
  }
  if (!IsInRange(kNotNegative, hyperparams.max_norm)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Invalid max_norm: ", hyperparams.max_norm));
  }
  const auto check = InfoOf(kind).check;
  return check == nullptr ? absl::OkStatus() : check(hyperparams);
}

}  // namespace optstate
