#include "kernels/whole_harness.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/whole_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

const std::vector<Shape>& AllShapes() {
  static const std::vector<Shape> kShapes = {
      {},       {0},      {1},       {17},       {4097}, {3, 5},
      {64, 65}, {65, 64}, {2, 3, 5}, {128, 300}, {3, 0}, {4, 1}};
  return kShapes;
}

std::string NameOfShape(const Shape& shape) {
  return shape.empty() ? "Scalar" : absl::StrJoin(shape, "x");
}

}  // namespace

KernelRun::KernelRun(OptimizerKind kind, Shape shape, std::vector<float> master)
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

void KernelRun::Step(const Hyperparams& hyperparams,
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

// Returns the defaults with some values changed.
WholeSetting SettingOf(const std::string& name, OptimizerKind kind,
                       std::vector<std::pair<size_t, double>> changes) {
  WholeSetting setting = {name, kind, DefaultHyperparams(kind)};
  for (const auto& [index, value] : changes) setting.hyperparams[index] = value;
  return setting;
}

std::vector<Scenario> ScenariosOf(const std::vector<WholeSetting>& settings) {
  std::vector<Scenario> scenarios;
  for (const WholeSetting& setting : settings) {
    const WholeKernel& kernel = *FindWholeKernel(setting.kind);
    for (const Shape& shape : AllShapes()) {
      if (!kernel.check_shape(shape).ok()) continue;
      scenarios.push_back({absl::StrCat(setting.name, "_", NameOfShape(shape)),
                           setting.kind, setting.hyperparams, shape});
    }
  }
  return scenarios;
}

GradientSource::GradientSource(size_t numel, std::mt19937* random)
    : random_(random), scale_(numel) {
  std::uniform_real_distribution<float> exponent(-8, 3);
  for (float& x : scale_) x = std::exp(exponent(*random_));
}

std::vector<float> GradientSource::Next() {
  std::vector<float> gradient(scale_.size());
  for (size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = (normal_(*random_) + 0.3f) * scale_[i];
  }
  return gradient;
}

std::vector<float> RandomMaster(size_t numel, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> master(numel);
  for (float& x : master) x = normal(*random);
  return master;
}

std::vector<double> Doubles(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

}  // namespace optstate::kernels
