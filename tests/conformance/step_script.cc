#include "tests/conformance/step_script.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/fake/fake_arithmetic.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

using client::StateArray;

// Gradients and parameters are k / 64 with |k| <= 127: 7 bits, which even
// bfloat16 holds.
constexpr int kUnitsMax = 127;
constexpr float kUnit = 1.0f / 64;

std::vector<std::byte> RandomValues(DType dtype, int64_t numel,
                                    std::mt19937_64& generator) {
  std::uniform_int_distribution<int> units(-kUnitsMax, kUnitsMax);
  std::vector<std::byte> bytes(static_cast<size_t>(numel) * SizeInBytes(dtype));
  for (uint64_t i = 0; i < static_cast<uint64_t>(numel); ++i) {
    client::StoreElement(dtype, bytes.data(), i,
                         static_cast<float>(units(generator)) * kUnit);
  }
  return bytes;
}

ParameterSpec Parameter(std::string name, std::vector<int64_t> shape,
                        DType dtype, DType gradient_dtype, uint32_t group) {
  int64_t numel = 1;
  for (const int64_t dimension : shape) numel *= dimension;
  return {.name = std::move(name),
          .shape = std::move(shape),
          .numel = numel,
          .dtype = dtype,
          .gradient_dtype = gradient_dtype,
          .group = group};
}

std::vector<const void*> Pointers(
    const std::vector<std::vector<std::byte>>& arrays) {
  // The pointer is never null, as an empty vector's may be.
  static const std::byte kNothing{};
  std::vector<const void*> pointers;
  pointers.reserve(arrays.size());
  for (const auto& array : arrays) {
    pointers.push_back(array.empty() ? &kNothing : array.data());
  }
  return pointers;
}

}  // namespace

uint64_t ScriptSeed() {
  const char* given = std::getenv("OPTSTATE_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 0)
                                         : std::random_device{}();
  std::cerr << "OPTSTATE_TEST_SEED=" << seed << std::endl;
  return seed;
}

LayoutSpec MixedLayout() {
  const DType f32 = DType::kFloat32;
  const DType bf16 = DType::kBFloat16;
  const DType f16 = DType::kFloat16;
  return {.optimizer = OptimizerKind::kAdamW,
          .groups = {{.options = 0}, {.options = adam::kAmsgrad}},
          .parameters = {Parameter("embed", {8, 9}, f32, f32, 0),
                         Parameter("block.w", {50, 100}, bf16, bf16, 0),
                         Parameter("block.half", {17}, f16, f16, 0),
                         Parameter("empty", {0, 3}, f32, f32, 0),
                         Parameter("scalar", {}, f32, bf16, 1),
                         Parameter("tile", {4096}, bf16, f32, 1),
                         Parameter("tail", {4097}, f32, f16, 1)}};
}

LayoutSpec UniformLayout(size_t count, int64_t numel) {
  LayoutSpec layout{.optimizer = OptimizerKind::kAdamW,
                    .groups = {{.options = 0}},
                    .parameters = {}};
  for (size_t i = 0; i < count; ++i) {
    layout.parameters.push_back(Parameter(absl::StrCat("p", i), {numel},
                                          DType::kFloat32, DType::kFloat32, 0));
  }
  return layout;
}

client::SessionOptions NewJob(LayoutSpec layout) {
  static std::atomic<int> count{0};
  client::SessionOptions options;
  options.job = absl::StrCat("job-", getpid(), "-", count.fetch_add(1));
  options.layout = std::move(layout);
  return options;
}

client::CommitOptions CommitOf(const client::Session& session, uint64_t step) {
  client::CommitOptions commit;
  commit.step = step;
  commit.groups.resize(session.layout().groups().size(), AdamHyperparams());
  return commit;
}

StepScript::StepScript(const Layout& layout, uint64_t seed)
    : layout_(layout), seed_(seed) {}

absl::Status StepScript::Load(client::Session& session) const {
  OPTSTATE_RETURN_IF_ERROR(session.BeginLoad());
  std::mt19937_64 generator(seed_);
  for (uint32_t i = 0; i < layout_.parameters().size(); ++i) {
    const ParameterSpec& parameter = layout_.parameters()[i];
    const std::vector<std::byte> values =
        RandomValues(parameter.dtype, parameter.numel, generator);
    OPTSTATE_RETURN_IF_ERROR(
        session.Load(StateArray::kMaster, i, parameter.dtype, values));
  }
  return session.FinishLoad();
}

Hyperparams DrawHyperparams(const OptimizerInfo& info,
                            absl::FunctionRef<double()> unit) {
  Hyperparams hyperparams = DefaultHyperparams(info.kind);
  for (size_t k = 0; k < info.hyperparams.size(); ++k) {
    const absl::string_view name = info.hyperparams[k].name;
    double& value = hyperparams[k];
    if (name == "lr") value = 1e-4 + 1e-2 * unit();
    if (name == "betas.0") value = 0.8 + 0.15 * unit();
    if (name == "betas.1") value = 0.9 + 0.09 * unit();
    if (name == "weight_decay") value = 0.1 * unit();
    if (name == "momentum") value = 0.5 + 0.4 * unit();
    if (name == "maximize") value = unit() < 0.2 ? 1 : 0;
  }
  return hyperparams;
}

StepScript::Step StepScript::Make(uint64_t step) const {
  std::mt19937_64 generator(seed_ + 7919 * step);
  std::uniform_real_distribution<double> unit(0, 1);
  Step made;
  made.commit.step = step;
  for (size_t i = 0; i < layout_.groups().size(); ++i) {
    made.commit.groups.push_back(DrawHyperparams(
        layout_.optimizer_info(), [&] { return unit(generator); }));
  }
  made.commit.grad_scale = unit(generator) < 0.5 ? 1 : 1024;
  made.commit.max_norm = unit(generator) < 0.5 ? 0 : 0.5 + unit(generator);
  for (uint32_t i = 0; i < layout_.parameters().size(); ++i) {
    if (unit(generator) < 0.15) continue;
    const ParameterSpec& parameter = layout_.parameters()[i];
    made.parameters.push_back(i);
    made.gradients.push_back(
        RandomValues(parameter.gradient_dtype, parameter.numel, generator));
  }
  return made;
}

absl::Status StepScript::Push(client::Session& session, const Step& step) {
  return session.PushGradients(step.commit.step, 0, step.parameters,
                               Pointers(step.gradients));
}

absl::StatusOr<client::Outcome> StepScript::Run(client::Session& session,
                                                uint64_t step) const {
  const Step made = Make(step);
  OPTSTATE_RETURN_IF_ERROR(Push(session, made));
  return session.Commit(made.commit);
}

std::vector<std::byte> ConstantGradient(const Layout& layout,
                                        uint32_t parameter, float value) {
  const ParameterSpec& spec = layout.parameters()[parameter];
  std::vector<std::byte> bytes(static_cast<size_t>(spec.numel) *
                               SizeInBytes(spec.gradient_dtype));
  for (uint64_t i = 0; i < static_cast<uint64_t>(spec.numel); ++i) {
    client::StoreElement(spec.gradient_dtype, bytes.data(), i, value);
  }
  return bytes;
}

absl::Status PushConstant(client::Session& session, uint64_t step,
                          uint32_t micro_step, float value) {
  std::vector<uint32_t> parameters;
  std::vector<std::vector<std::byte>> gradients;
  for (uint32_t i = 0; i < session.layout().parameters().size(); ++i) {
    parameters.push_back(i);
    gradients.push_back(ConstantGradient(session.layout(), i, value));
  }
  return session.PushGradients(step, micro_step, parameters,
                               Pointers(gradients));
}

absl::Status LoadConstant(client::Session& session, float value) {
  OPTSTATE_RETURN_IF_ERROR(session.BeginLoad());
  for (uint32_t i = 0; i < session.layout().parameters().size(); ++i) {
    const std::vector<float> values(
        static_cast<size_t>(session.layout().parameters()[i].numel), value);
    OPTSTATE_RETURN_IF_ERROR(
        session.Load(StateArray::kMaster, i, DType::kFloat32,
                     {reinterpret_cast<const std::byte*>(values.data()),
                      values.size() * sizeof(float)}));
  }
  return session.FinishLoad();
}

namespace {

// Returns the arrays of a group's parameters, by name.
std::vector<std::pair<StateArray, std::string>> ArraysOf(const Layout& layout,
                                                         uint32_t group) {
  std::vector<std::pair<StateArray, std::string>> arrays = {
      {StateArray::kMaster, "master"}, {StateArray::kStepCount, "step_count"}};
  const OptimizerInfo& info = layout.optimizer_info();
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout.has_state_array(k, group)) continue;
    arrays.emplace_back(
        static_cast<StateArray>(static_cast<int>(StateArray::kState0) + k),
        info.state_arrays[static_cast<size_t>(k)].name);
  }
  if (!info.scalar.empty()) {
    arrays.emplace_back(StateArray::kScalar, info.scalar);
  }
  return arrays;
}

}  // namespace

absl::StatusOr<std::vector<std::byte>> ParameterOf(client::Session& session,
                                                   uint32_t parameter) {
  if (session.CheckHasParameters().ok()) {
    const auto values = session.parameter(parameter);
    return std::vector<std::byte>(values.begin(), values.end());
  }
  const ParameterSpec& spec = session.layout().parameters()[parameter];
  std::vector<std::byte> values(static_cast<uint64_t>(spec.numel) *
                                SizeInBytes(spec.dtype));
  OPTSTATE_RETURN_IF_ERROR(
      session.Fetch(StateArray::kParameter, parameter, absl::MakeSpan(values))
          .status());
  return values;
}

absl::StatusOr<StateSnapshot> Snapshot(client::Session& session) {
  StateSnapshot snapshot;
  snapshot.step = session.committed_step();
  for (uint32_t i = 0; i < session.layout().parameters().size(); ++i) {
    const ParameterSpec& parameter = session.layout().parameters()[i];
    OPTSTATE_ASSIGN_OR_RETURN(std::vector<std::byte> values,
                              ParameterOf(session, i));
    snapshot.names.push_back(absl::StrCat("parameter ", parameter.name));
    snapshot.arrays.push_back(std::move(values));
    for (const auto& [array, name] :
         ArraysOf(session.layout(), parameter.group)) {
      std::vector<std::byte> bytes(
          client::ElementCount(session.layout(), array, parameter) *
          (IsPerParameter(array) ? sizeof(int64_t) : sizeof(float)));
      OPTSTATE_ASSIGN_OR_RETURN(const uint64_t step,
                                session.Fetch(array, i, absl::MakeSpan(bytes)));
      if (step != snapshot.step) {
        return absl::InternalError(absl::StrCat(
            "fetched step ", step, " of a job at step ", snapshot.step));
      }
      snapshot.names.push_back(absl::StrCat(name, " of ", parameter.name));
      snapshot.arrays.push_back(std::move(bytes));
    }
  }
  return snapshot;
}

std::string FirstDifference(const StateSnapshot& a, const StateSnapshot& b) {
  if (a.step != b.step) return absl::StrCat("steps ", a.step, ", ", b.step);
  if (a.names != b.names) return "different arrays";
  for (size_t i = 0; i < a.arrays.size(); ++i) {
    const auto [left, right] =
        std::mismatch(a.arrays[i].begin(), a.arrays[i].end(),
                      b.arrays[i].begin(), b.arrays[i].end());
    if (left == a.arrays[i].end() && right == b.arrays[i].end()) continue;
    return absl::StrCat(a.names[i], " differs at byte ",
                        left - a.arrays[i].begin(), " of ", a.arrays[i].size());
  }
  return std::string();
}

}  // namespace optstate
