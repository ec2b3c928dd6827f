// Runs the suite with each runtime. CUDA's skips where there is no device, and
// says why.

#include "storage/accelerator/device_suite.h"

#include <memory>

#include "gtest/gtest.h"
#include "storage/accelerator/cuda_runtime.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::accelerator {
namespace {

std::unique_ptr<DeviceRuntime> MakeEmulated() {
  EmulatedOptions options;
  options.memory_bytes = 64 << 20;
  return MakeEmulatedRuntime(options);
}

std::unique_ptr<DeviceRuntime> MakeSlow() {
  EmulatedOptions options;
  options.devices = 2;
  options.memory_bytes = 64 << 20;
  options.link_bytes_per_s = uint64_t{1} << 30;
  return MakeEmulatedRuntime(options);
}

INSTANTIATE_TEST_SUITE_P(
    Runtimes, DeviceSuite,
    testing::Values(DeviceRuntimeParam{"Emulated", MakeEmulated},
                    DeviceRuntimeParam{"EmulatedSlowLink", MakeSlow},
                    DeviceRuntimeParam{"Cuda", MakeCudaRuntime}),
    [](const auto& tested) { return tested.param.name; });

TEST(CudaRuntimeTest, WithoutADriverItSaysSo) {
  const auto devices = MakeCudaRuntime()->Devices();
  if (devices.ok()) GTEST_SKIP() << "there is a driver here";
  EXPECT_EQ(devices.status().code(), absl::StatusCode::kFailedPrecondition)
      << devices.status();
  EXPECT_FALSE(devices.status().message().empty());
  EXPECT_EQ(MakeCudaRuntime()->Open(0).status(), devices.status());
}

}  // namespace
}  // namespace optstate::accelerator
