// Runs the kernels on a GPU and compares them with the CPU's, bit by bit.

#include <gtest/gtest.h>

#ifndef OPTSTATE_HAS_CUDA

TEST(DeviceKernelsTest, NeedsDeviceCode) {
  GTEST_SKIP() << "built without device code: there is no CUDA Toolkit in "
                  "$CUDA_HOME or /usr/local/cuda, or --//:cuda=off";
}

#else

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/rule_calls.h"
#include "kernels/cpu/targets.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/test_parameters.h"
#include "kernels/cuda/test_reductions.h"
#include "kernels/cuda/test_tiles.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/ops/scalar_ops.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"

namespace optstate::kernels::cuda {
namespace {

// Returns why no kernel can run here; empty: one can.
std::string WhyNoDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count == 0 ? "there is no CUDA device" : "";
}

struct DeviceMemory {
  static void* Allocate(size_t bytes) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
    return memory;
  }
  static void Free(void* memory) { cudaFree(memory); }
  // Waits for kernels before it.
  static void Copy(void* to, const void* from, size_t bytes) {
    EXPECT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), cudaSuccess);
  }
};
using DeviceCopies = Copies<DeviceMemory>;

// Updates a view on the device, as tiles of 512 in one launch.
bool ApplyOnDevice(const UpdateKernelKey& key, const UpdateFactors& factors,
                   const TileView& view) {
  constexpr size_t kTileElements = 512;
  return UpdateCopies<DeviceMemory>(
      key, view, [&](const TileView& moved, DeviceCopies* inputs) {
        const std::vector<TileTask> tasks =
            TilesOf(key, factors, moved, kTileElements);
        const UpdateFactors all[] = {{}, factors};
        const auto count = static_cast<uint32_t>(tasks.size());
        const cudaError_t launched =
            LaunchUpdate(key.optimizer, key.options,
                         inputs->Add(tasks.data(), count * sizeof(TileTask)),
                         count, inputs->Add(all, sizeof(all)), nullptr);
        EXPECT_EQ(launched, cudaSuccess) << cudaGetErrorString(launched);
        const cudaError_t ran = cudaDeviceSynchronize();
        EXPECT_EQ(ran, cudaSuccess) << cudaGetErrorString(ran);
        return launched == cudaSuccess && ran == cudaSuccess;
      });
}

class DeviceUpdateTest : public testing::TestWithParam<UpdateKernelKey> {};

TEST_P(DeviceUpdateTest, IsWhatTheCpuDoes) {
  if (const std::string why = WhyNoDevice(); !why.empty()) GTEST_SKIP() << why;
  const UpdateKernelKey& key = GetParam();
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = cpu::FirstFactors(key);
  constexpr uint64_t kFlatBegin = (uint64_t{1} << 32) - 700;
  for (size_t numel : {0, 1, 255, 256, 257, 1000, 3000}) {
    const auto elements = cpu::RandomElements(numel, &random);
    const auto on = [&](cpu::Target target, auto* apply) {
      return cpu::Apply(
          {.target = target, .flat_begin = kFlatBegin, .apply = apply}, key,
          factors, elements);
    };
    const auto expected =
        cpu::Apply({.target = cpu::PlainTarget(), .flat_begin = kFlatBegin},
                   key, factors, elements);
    ASSERT_EQ(on(cpu::PlainTarget(), &ApplyOnDevice), expected) << numel;
  }
}

INSTANTIATE_TEST_SUITE_P(Keys, DeviceUpdateTest,
                         testing::ValuesIn(cpu::AllKeys()),
                         [](const auto& key) {
                           return cpu::NameOfKey(key.param);
                         });

class DeviceWholeTest : public testing::TestWithParam<OptimizerKind> {};

TEST_P(DeviceWholeTest, IsWhatTheCpuDoes) {
  if (const std::string why = WhyNoDevice(); !why.empty()) GTEST_SKIP() << why;
  std::mt19937 random(TestSeed());
  for (const TestParameter::Shape& shape : TestParameter::Shapes(GetParam())) {
    const TestParameter parameter(GetParam(), shape, &random);
    const TestParameter::Bits computed = parameter.ComputedBy<DeviceMemory>(
        [](const std::vector<WholeTask>& tasks, DeviceCopies* inputs) {
          const cudaError_t launched = LaunchWhole(
              GetParam(),
              inputs->Add(tasks.data(), tasks.size() * sizeof(WholeTask)),
              static_cast<uint32_t>(tasks.size()), RoundsOf(tasks), nullptr);
          EXPECT_EQ(launched, cudaSuccess) << cudaGetErrorString(launched);
          const cudaError_t ran = cudaDeviceSynchronize();
          EXPECT_EQ(ran, cudaSuccess) << cudaGetErrorString(ran);
          return launched == cudaSuccess && ran == cudaSuccess;
        });
    ASSERT_EQ(computed, parameter.ComputedOn(cpu::PlainTarget()))
        << testing::PrintToString(shape);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceWholeTest,
                         testing::Values(OptimizerKind::kLamb,
                                         OptimizerKind::kAdafactor,
                                         OptimizerKind::kMuon),
                         [](const auto& kind) {
                           return std::string(InfoOf(kind.param).name);
                         });

TEST(DeviceReduceTest, IsWhatTheCpuDoes) {
  if (const std::string why = WhyNoDevice(); !why.empty()) GTEST_SKIP() << why;
  std::mt19937 random(TestSeed());
  for (TestReduction& test : TestReductions(&random)) {
    DeviceCopies memory;
    const float* const gradient =
        memory.Add(test.values.data(), test.values.size() * sizeof(float));
    const void* const pointers[] = {gradient};
    const void* const* addresses = memory.Add(pointers, sizeof(pointers));
    std::vector<ReduceTask> tasks = test.TasksOf(addresses);
    const auto count = static_cast<uint32_t>(tasks.size());
    ParameterTasks parameter = {0, count};
    std::vector<double> zeros(count);
    uint32_t found = 0;
    double sum = 0;
    double* const results = memory.Add(zeros.data(), count * sizeof(double));
    uint32_t* const found_inf = memory.Add(&found, sizeof(found));
    double* const sums = memory.Add(&sum, sizeof(sum));
    ASSERT_EQ(LaunchReduce(test.reduction,
                           memory.Add(tasks.data(), count * sizeof(ReduceTask)),
                           count, results, found_inf, nullptr),
              cudaSuccess);
    ASSERT_EQ(LaunchAddTiles(memory.Add(&parameter, sizeof(parameter)), 1,
                             results, sums, nullptr),
              cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    memory.CopyBack();
    EXPECT_EQ(
        std::memcmp(zeros.data(), test.expected.data(), count * sizeof(double)),
        0);
    EXPECT_EQ(std::memcmp(&sum, &test.expected_sum, sizeof(double)), 0);
    EXPECT_EQ(found != 0, test.has_infinity);
  }
}

}  // namespace
}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_HAS_CUDA
