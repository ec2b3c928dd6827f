#ifndef OPTSTATE_KERNELS_CUDA_TEST_PARAMETERS_H_
#define OPTSTATE_KERNELS_CUDA_TEST_PARAMETERS_H_

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cpu/targets.h"
#include "kernels/cpu/whole_rules.h"
#include "kernels/cuda/test_tiles.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "kernels/whole_shape.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {

// One parameter in training, whose next step kernels of the CPU and of devices
// compute. For tests.
class TestParameter {
 public:
  using Shape = std::vector<int64_t>;
  // The new master and states.
  using Bits = std::vector<uint32_t>;

  // Shapes on either side of a block, of a launch's stride, and of a matrix, of
  // those that the optimizer takes.
  static std::vector<Shape> Shapes(OptimizerKind kind) {
    if (kind == OptimizerKind::kMuon) {
      return {{1, 1},   {3, 5},   {64, 65},  {65, 64},  {1, 40},
              {40, 1},  {33, 31}, {64, 64},  {130, 70}, {70, 130},
              {16, 16}, {17, 90}, {1100, 17}};
    }
    return {{},         {1},       {17},      {257},          {4097},
            {70000},    {3, 5},    {64, 65},  {1, 1},         {1, 40},
            {40, 1},    {33, 31},  {2, 3, 5}, {2, 2, 19, 33}, {70, 3, 3, 3},
            {1100, 17}, {3, 17000}};
  }

  TestParameter(OptimizerKind kind, Shape shape, std::mt19937* random)
      : kind_(kind), shape_(std::move(shape)) {
    input_.hyperparams = DefaultHyperparams(kind);
    const auto infos = InfoOf(kind).hyperparams;
    for (size_t i = 0; i < infos.size(); ++i) {
      if (infos[i].name == "weight_decay") input_.hyperparams[i] = 0.07;
    }
    gradient_ = RandomFloats(NumelOf(shape_), random);
    master_ = RandomFloats(NumelOf(shape_), random);
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (static_cast<size_t>(k) >= InfoOf(kind).state_arrays.size()) break;
      states_[static_cast<size_t>(k)] =
          RandomFloats(StateElements(InfoOf(kind), k, shape_), random);
      // A possible state of every optimizer is never negative.
      for (float& value : states_[static_cast<size_t>(k)]) {
        value = std::abs(value);
      }
    }
  }

  uint64_t numel() const { return master_.size(); }
  UpdateInput& input() { return input_; }
  std::vector<float>& gradient() { return gradient_; }
  std::vector<float>& master() { return master_; }
  std::vector<float>& state(size_t k) { return states_[k]; }

  // Returns what the kernel of a target computes.
  Bits ComputedOn(cpu::Target target) const {
    const WholeKernel& kernel = *cpu::FindWholeKernel(kind_, target);
    std::vector<float> new_master(master_.size());
    std::array<std::vector<float>, kStateArraysMax> new_states;
    WholeView view;
    view.shape = shape_;
    view.numel = master_.size();
    view.gradient = gradient_.data();
    view.master = master_.data();
    view.new_master = new_master.data();
    for (size_t k = 0; k < kStateArraysMax; ++k) {
      new_states[k].resize(states_[k].size());
      view.state[k] = states_[k].data();
      view.new_state[k] = new_states[k].data();
    }
    const size_t bytes = kernel.workspace_elements(shape_) * sizeof(float);
    const std::unique_ptr<float, FreeMemory> workspace(
        static_cast<float*>(std::aligned_alloc(64, (bytes / 64 + 1) * 64)));
    view.workspace = workspace.get();
    kernel.compute(input_, view);
    return BitsOf(new_master, new_states);
  }

  // Lets `launch(tasks, inputs)` compute it in copies in `Memory`, behind
  // another parameter in the same launch, and returns that it computes. `tasks`
  // are on the host; `inputs` takes what is only read. Empty: it returned
  // false.
  template <class Memory, class Launch>
  Bits ComputedBy(const Launch& launch) const {
    Copies<Memory> arrays;
    Copies<Memory> inputs;
    std::vector<float> gradient = gradient_;
    std::vector<float> master = master_;
    std::array<std::vector<float>, kStateArraysMax> states = states_;
    std::vector<double> means(MeansOf(kind_, shape_),
                              std::numeric_limits<double>::quiet_NaN());
    std::vector<float> scratch(ScratchOf(kind_, shape_), 7);
    DescentFactors descent = {};
    WholeTask task = WholeTaskOf(kind_, input_, shape_);
    task.gradient = Added(&gradient, &arrays);
    task.master = Added(&master, &arrays);
    for (size_t k = 0; k < kStateArraysMax; ++k) {
      task.state[k] = Added(&states[k], &arrays);
    }
    task.means = Added(&means, &arrays);
    task.scratch = Added(&scratch, &arrays);
    task.descent = arrays.Add(&descent, sizeof(descent));

    // Every optimizer takes a matrix, whose states are no larger than itself.
    const Shape other_shape = {2, 3};
    std::vector<float> other_array(6, 1);
    std::vector<double> other_means(MeansOf(kind_, other_shape));
    std::vector<float> other_scratch(ScratchOf(kind_, other_shape));
    DescentFactors other_descent = {};
    WholeTask other = WholeTaskOf(kind_, input_, other_shape);
    other.gradient = Added(&other_array, &arrays);
    other.master = Added(&other_array, &arrays);
    for (float*& state : other.state) state = Added(&other_array, &arrays);
    other.means = Added(&other_means, &arrays);
    other.scratch = Added(&other_scratch, &arrays);
    other.descent = arrays.Add(&other_descent, sizeof(other_descent));

    const std::vector<WholeTask> tasks = {other, task};
    if (!launch(tasks, &inputs)) return {};
    arrays.CopyBack();
    return BitsOf(master, states);
  }

 private:
  struct FreeMemory {
    void operator()(float* memory) const { std::free(memory); }
  };

  template <class Element, class Memory>
  static Element* Added(std::vector<Element>* array, Copies<Memory>* copies) {
    return copies->Add(array->data(), array->size() * sizeof(Element));
  }

  // Values spread over many magnitudes, so that the order of a sum shows in its
  // last bits.
  static std::vector<float> RandomFloats(uint64_t numel, std::mt19937* random) {
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> exponent(-20, 4);
    std::vector<float> values(numel);
    for (float& value : values) {
      value = normal(*random) * std::exp(exponent(*random));
    }
    return values;
  }

  static Bits BitsOf(
      const std::vector<float>& master,
      const std::array<std::vector<float>, kStateArraysMax>& states) {
    Bits bits;
    bits.reserve(master.size());
    for (const float value : master) {
      bits.push_back(std::bit_cast<uint32_t>(value));
    }
    for (const std::vector<float>& state : states) {
      for (const float value : state) {
        bits.push_back(std::bit_cast<uint32_t>(value));
      }
    }
    return bits;
  }

  const OptimizerKind kind_;
  const Shape shape_;
  UpdateInput input_;
  std::vector<float> gradient_;
  std::vector<float> master_;
  std::array<std::vector<float>, kStateArraysMax> states_;
};

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_TEST_PARAMETERS_H_
