#ifndef OPTSTATE_KERNELS_WHOLE_HARNESS_H_
#define OPTSTATE_KERNELS_WHOLE_HARNESS_H_

// Test helpers that train a parameter with a whole-parameter kernel.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/whole_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {

using Shape = std::vector<int64_t>;

struct FreeDeleter {
  void operator()(float* array) const { std::free(array); }
};

// A parameter and its state, updated by a kernel.
class KernelRun {
 public:
  KernelRun(OptimizerKind kind, Shape shape, std::vector<float> master);

  void Step(const Hyperparams& hyperparams, const std::vector<float>& gradient);

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

inline void PrintTo(const Scenario& scenario, std::ostream* os) {
  *os << scenario.name;
}

struct WholeSetting {
  std::string name;
  OptimizerKind kind;
  Hyperparams hyperparams;
};

// Returns the defaults with some values changed.
WholeSetting SettingOf(const std::string& name, OptimizerKind kind,
                       std::vector<std::pair<size_t, double>> changes);

// Returns each setting with each shape that its optimizer takes.
std::vector<Scenario> ScenariosOf(const std::vector<WholeSetting>& settings);

// Makes gradients with a mean, each element at a magnitude of its own.
class GradientSource {
 public:
  GradientSource(size_t numel, std::mt19937* random);

  std::vector<float> Next();

 private:
  std::mt19937* const random_;
  std::normal_distribution<float> normal_;
  std::vector<float> scale_;
};

std::vector<float> RandomMaster(size_t numel, std::mt19937* random);

std::vector<double> Doubles(const std::vector<float>& values);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_WHOLE_HARNESS_H_
