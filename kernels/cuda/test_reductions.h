#ifndef OPTSTATE_KERNELS_CUDA_TEST_REDUCTIONS_H_
#define OPTSTATE_KERNELS_CUDA_TEST_REDUCTIONS_H_

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cpu/reduce.h"
#include "kernels/cpu/rule_calls.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/reduction.h"
#include "proto/types/dtype.h"

namespace optstate::kernels::cuda {

// Gradients of one parameter to reduce tile by tile, and what the CPU's kernels
// make of them.
struct TestReduction {
  static constexpr size_t kTileElements = 512;

  Reduction reduction = Reduction::kSumOfSquares;
  bool has_infinity = false;
  std::vector<float> values;
  std::vector<double> expected;  // by tile
  double expected_sum = 0;       // of the tiles, in order

  // Returns a task for each tile. `addresses` has that of the values.
  std::vector<ReduceTask> TasksOf(const void* const* addresses) const {
    std::vector<ReduceTask> tasks;
    for (size_t i = 0; i < values.size(); i += kTileElements) {
      tasks.push_back({{addresses, 1, DType::kFloat32, i},
                       std::min(kTileElements, values.size() - i)});
    }
    return tasks;
  }
};

// Returns every reduction of values with a zero, a denormal, a value whose
// square overflows, and an infinity.
inline std::vector<TestReduction> TestReductions(std::mt19937* random) {
  std::vector<TestReduction> tests;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Reduction reduction :
       {Reduction::kSumOfSquares, Reduction::kSumOfAbsolutes,
        Reduction::kLargestAbsolute}) {
    for (const float special : {0.0f, 1e-42f, 3e38f, infinity}) {
      TestReduction test;
      test.reduction = reduction;
      test.has_infinity = special == infinity;
      test.values.resize(40 * TestReduction::kTileElements + 17);
      for (float& value : test.values) value = cpu::RandomNormal(random);
      test.values[1000] = special;
      const void* const whole = test.values.data();
      for (const ReduceTask& task : test.TasksOf(&whole)) {
        const void* const part = test.values.data() + task.gradient.begin;
        test.expected.push_back(cpu::ReduceOn(cpu::PlainTarget(), reduction,
                                              DType::kFloat32, {&part, 1},
                                              task.numel));
        test.expected_sum += test.expected.back();
      }
      tests.push_back(std::move(test));
    }
  }
  return tests;
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_TEST_REDUCTIONS_H_
