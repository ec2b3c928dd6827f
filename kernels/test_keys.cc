#include "kernels/test_keys.h"

#include <cctype>
#include <cstddef>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"

namespace optstate::kernels {
namespace {

using Values = std::initializer_list<std::pair<size_t, double>>;

Hyperparams With(OptimizerKind kind, Values values) {
  Hyperparams hyperparams = DefaultHyperparams(kind);
  for (const auto& [index, value] : values) hyperparams[index] = value;
  return hyperparams;
}

std::string Capitalised(absl::string_view name) {
  std::string capitalised(name);
  capitalised[0] = static_cast<char>(std::toupper(capitalised[0]));
  return capitalised;
}

std::vector<Setting> AdamSettings(OptimizerKind kind) {
  using namespace adam;
  const auto with = [kind](Values values) {
    Hyperparams hyperparams = DefaultHyperparams(kind);
    hyperparams[kWeightDecay] = 0;
    for (const auto& [index, value] : values) hyperparams[index] = value;
    return hyperparams;
  };
  return {
      {"Default", with({})},
      {"Decay", with({{kWeightDecay, 0.01}})},
      {"LanguageModel",
       with({{optstate::kLr, 3e-4}, {kBeta2, 0.95}, {kWeightDecay, 0.1}})},
      {"LargeEps", with({{kWeightDecay, 0.01}, {kEps, 1e-3}})},
      {"Slow", with({{optstate::kLr, 1e-2}, {kBeta1, 0.95}, {kBeta2, 0.9999}})},
      {"SmallBetas", with({{kBeta1, 0}, {kBeta2, 0.4}, {kWeightDecay, 0.01}})},
      {"Maximize", with({{kWeightDecay, 0.01}, {kMaximize, 1}})}};
}

std::vector<Setting> SgdSettings(uint32_t options) {
  using namespace sgd;
  const double momentum = options == kHasMomentum ? 0.9 : 0;
  const auto with = [momentum](Values values) {
    Hyperparams hyperparams = With(OptimizerKind::kSgd, values);
    hyperparams[kMomentum] = momentum;
    return hyperparams;
  };
  std::vector<Setting> settings = {
      {"Default", with({})},
      {"Decay", with({{optstate::kLr, 1e-2}, {kWeightDecay, 0.01}})},
      {"Maximize", with({{kWeightDecay, 0.01}, {kMaximize, 1}})}};
  if (options == kHasMomentum) {
    settings.push_back({"Dampening", with({{kDampening, 0.3}})});
    settings.push_back(
        {"Nesterov", with({{kNesterov, 1}, {kWeightDecay, 0.01}})});
    settings.push_back({"MomentumOff", With(OptimizerKind::kSgd, {})});
  }
  return settings;
}

std::vector<Setting> AdagradSettings() {
  using namespace adagrad;
  const auto with = [](Values values) {
    return With(OptimizerKind::kAdagrad, values);
  };
  return {{"Default", with({})},
          {"Decay", with({{kWeightDecay, 0.01}})},
          {"LrDecay", with({{optstate::kLr, 0.1}, {kLrDecay, 1e-2}})},
          {"InitialValue", with({{kInitialAccumulatorValue, 0.1}})},
          {"LargeEps", with({{kEps, 1e-3}, {kWeightDecay, 0.01}})},
          {"Maximize", with({{kMaximize, 1}, {kWeightDecay, 0.01}})}};
}

std::vector<Setting> RmspropSettings(uint32_t options) {
  using namespace rmsprop;
  const bool has_momentum = (options & kHasMomentum) != 0;
  const auto with = [has_momentum](Values values) {
    Hyperparams hyperparams = With(OptimizerKind::kRmsprop, values);
    if (has_momentum) hyperparams[kMomentum] = 0.9;
    return hyperparams;
  };
  std::vector<Setting> settings = {
      {"Default", with({})},
      {"Decay", with({{kWeightDecay, 0.01}})},
      {"SmallAlpha", with({{kAlpha, 0.4}, {kEps, 1e-3}})},
      {"LargeEps", with({{kEps, 1e-3}, {kWeightDecay, 0.01}})},
      {"Maximize", with({{kMaximize, 1}, {kWeightDecay, 0.01}})}};
  if (has_momentum) {
    settings.push_back({"MomentumOff", With(OptimizerKind::kRmsprop, {})});
  }
  return settings;
}

std::vector<Setting> LionSettings() {
  using namespace lion;
  const auto with = [](Values values) {
    return With(OptimizerKind::kLion, values);
  };
  return {
      {"Default", with({})},
      {"Decay", with({{kWeightDecay, 0.1}})},
      {"SmallBetas", with({{kBeta1, 0.3}, {kBeta2, 0.4}, {kWeightDecay, 0.1}})},
      {"Maximize", with({{kMaximize, 1}, {kWeightDecay, 0.1}})}};
}

// The indexes of these hyperparameters, which differ between NAdam and RAdam.
struct Places {
  OptimizerKind kind;
  size_t beta1, beta2, eps, weight_decay, decoupled, maximize;
};

std::vector<Setting> DecoupledSettings(const Places& at) {
  const auto with = [&at](Values values) { return With(at.kind, values); };
  return {{"Default", with({})},
          {"Decay", with({{at.weight_decay, 0.01}})},
          {"Decoupled", with({{at.weight_decay, 0.1}, {at.decoupled, 1}})},
          {"LanguageModel",
           with({{at.beta2, 0.95}, {at.weight_decay, 0.1}, {at.decoupled, 1}})},
          {"LargeEps", with({{at.eps, 1e-3}})},
          {"SmallBetas", with({{at.beta1, 0}, {at.beta2, 0.4}})},
          {"Maximize", with({{at.weight_decay, 0.01}, {at.maximize, 1}})}};
}

}  // namespace

std::vector<Variant> AllVariants() {
  std::vector<Variant> variants;
  for (const OptimizerInfo& info : Optimizers()) {
    if (!info.is_separable) continue;
    for (uint32_t options = 0; options < 1u << info.options.size(); ++options) {
      variants.push_back({info.kind, options});
    }
  }
  return variants;
}

std::string NameOf(const Variant& variant) {
  const OptimizerInfo& info = InfoOf(variant.kind);
  std::string name = Capitalised(info.name);
  for (size_t k = 0; k < info.options.size(); ++k) {
    if ((variant.options >> k & 1) == 0) continue;
    absl::StrAppend(&name, Capitalised(info.options[k]));
  }
  return name;
}

std::vector<Setting> SettingsOf(const Variant& variant) {
  switch (variant.kind) {
    case OptimizerKind::kSgd:
      return SgdSettings(variant.options);
    case OptimizerKind::kAdagrad:
      return AdagradSettings();
    case OptimizerKind::kRmsprop:
      return RmspropSettings(variant.options);
    case OptimizerKind::kLion:
      return LionSettings();
    case OptimizerKind::kNadam:
      return DecoupledSettings({variant.kind, nadam::kBeta1, nadam::kBeta2,
                                nadam::kEps, nadam::kWeightDecay,
                                nadam::kDecoupledWeightDecay,
                                nadam::kMaximize});
    case OptimizerKind::kRadam:
      return DecoupledSettings({variant.kind, radam::kBeta1, radam::kBeta2,
                                radam::kEps, radam::kWeightDecay,
                                radam::kDecoupledWeightDecay,
                                radam::kMaximize});
    default:
      return AdamSettings(variant.kind);
  }
}

UpdateFactors FactorsAt(const UpdateKernel& kernel, OptimizerKind kind,
                        UpdateInput input) {
  input.scalar = InfoOf(kind).scalar_initial;
  for (int64_t step = 1; step <= input.step_count; ++step) {
    if (kernel.advance == nullptr) break;
    input.scalar = kernel.advance(input.hyperparams, step, input.scalar);
  }
  return kernel.prepare(input);
}

}  // namespace optstate::kernels
