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
#include "kernels/cuda/test_reductions.h"
#include "kernels/cuda/test_tiles.h"
#include "kernels/cuda/tile_task.h"
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

// Memory that the device and the CPU see at one address.
class Managed {
 public:
  Managed() = default;
  Managed(const Managed&) = delete;
  Managed& operator=(const Managed&) = delete;
  ~Managed() {
    for (const Copy& copy : copies_) cudaFree(copy.device);
  }

  // Returns memory with the bytes of an array, null for null.
  template <class T>
  T* Add(T* host, size_t bytes) {
    if (host == nullptr) return nullptr;
    void* device = nullptr;
    EXPECT_EQ(cudaMallocManaged(&device, bytes + 1), cudaSuccess);
    std::memcpy(device, host, bytes);
    copies_.push_back(
        {const_cast<void*>(static_cast<const void*>(host)), device, bytes});
    return static_cast<T*>(device);
  }
  // Copies everything back to where it came from.
  void CopyBack() const {
    for (const Copy& copy : copies_) {
      std::memcpy(copy.host, copy.device, copy.bytes);
    }
  }

 private:
  struct Copy {
    void* host;
    void* device;
    size_t bytes;
  };
  std::vector<Copy> copies_;
};

// Updates a view on the device, as tiles of 512 in one launch.
bool ApplyOnDevice(const UpdateKernelKey& key, const UpdateFactors& factors,
                   const TileView& view) {
  constexpr size_t kTileElements = 512;
  Managed memory;
  Managed inputs;  // are not written, and need not be copied back
  TileView on_device = view;
  std::vector<const void*> gradients;
  for (const void* gradient : view.gradients) {
    gradients.push_back(
        inputs.Add(gradient, view.numel * SizeInBytes(key.gradient)));
  }
  const void* const* addresses =
      inputs.Add(gradients.data(), gradients.size() * sizeof(void*));
  on_device.gradients = {addresses, gradients.size()};
  on_device.parameter =
      memory.Add(view.parameter, view.numel * SizeInBytes(key.parameter));
  on_device.master =
      view.master == view.parameter
          ? on_device.parameter
          : memory.Add(view.master,
                       view.numel * scalar::BytesOfMaster(key.master));
  const size_t blocks =
      (view.numel + kQuantizedBlockElements - 1) / kQuantizedBlockElements;
  for (int k = 0; k < kStateArraysMax; ++k) {
    on_device.state[k] =
        memory.Add(view.state[k], view.numel * SizeInBytes(key.state));
    on_device.scale[k] = memory.Add(view.scale[k], blocks * sizeof(float));
  }
  std::vector<TileTask> tasks = TilesOf(key, factors, on_device, kTileElements);
  UpdateFactors all[] = {{}, factors};
  const auto count = static_cast<uint32_t>(tasks.size());
  const cudaError_t launched =
      LaunchUpdate(key.optimizer, key.options,
                   inputs.Add(tasks.data(), count * sizeof(TileTask)), count,
                   inputs.Add(all, sizeof(all)), nullptr);
  EXPECT_EQ(launched, cudaSuccess) << cudaGetErrorString(launched);
  const cudaError_t ran = cudaDeviceSynchronize();
  EXPECT_EQ(ran, cudaSuccess) << cudaGetErrorString(ran);
  memory.CopyBack();
  return launched == cudaSuccess && ran == cudaSuccess;
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

TEST(DeviceReduceTest, IsWhatTheCpuDoes) {
  if (const std::string why = WhyNoDevice(); !why.empty()) GTEST_SKIP() << why;
  std::mt19937 random(TestSeed());
  for (TestReduction& test : TestReductions(&random)) {
    Managed memory;
    const float* const gradient =
        memory.Add(test.values.data(), test.values.size() * sizeof(float));
    const void* pointers[] = {gradient};
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
    EXPECT_EQ(
        std::memcmp(results, test.expected.data(), count * sizeof(double)), 0);
    EXPECT_EQ(std::memcmp(sums, &test.expected_sum, sizeof(double)), 0);
    EXPECT_EQ(*found_inf != 0, test.has_infinity);
  }
}

}  // namespace
}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_HAS_CUDA
