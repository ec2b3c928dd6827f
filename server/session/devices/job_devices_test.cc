#include "server/session/devices/job_devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

// A machine of two devices, the second of which cannot be used.
class HalfRuntime final : public accelerator::DeviceRuntime {
 public:
  absl::StatusOr<std::vector<accelerator::DeviceInfo>> Devices() override {
    return emulated_->Devices();
  }
  absl::StatusOr<std::unique_ptr<accelerator::Device>> Open(
      size_t index) override {
    if (index == 1) return absl::FailedPreconditionError("it has no kernels");
    return emulated_->Open(index);
  }

 private:
  const std::unique_ptr<accelerator::DeviceRuntime> emulated_ =
      accelerator::MakeEmulatedRuntime({.devices = 2});
};

TEST(JobDevicesTest, OneThatCannotBeUsedLeavesNoneOpen) {
  HalfRuntime runtime;
  JobDevices devices("cuda", &runtime);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(devices.Open(),
              absl::FailedPreconditionError("it has no kernels"));
    EXPECT_TRUE(devices.devices().empty());
  }
}

TEST(JobDevicesTest, EmulatedOnesAreOpenedOnce) {
  JobDevices devices("emulated:2");
  EXPECT_TRUE(devices.devices().empty()) << "before they are asked for";
  ASSERT_EQ(devices.Open(), absl::OkStatus());
  ASSERT_EQ(devices.devices().size(), 2u);
  accelerator::Device* const first = devices.devices()[0];
  ASSERT_EQ(devices.Open(), absl::OkStatus());
  EXPECT_EQ(devices.devices()[0], first);
  EXPECT_EQ(devices.kernels(), scheduler::EmulatedKernels());
}

TEST(JobDevicesTest, NoneAreRefusedWithWhatToDo) {
  JobDevices devices("none");
  const absl::Status refused = devices.Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--devices"));
}

TEST(JobDevicesTest, ARuntimeInPlaceOfTheNamedOneThatHasNone) {
  const auto runtime = accelerator::MakeEmulatedRuntime({.devices = 0});
  JobDevices devices("cuda", runtime.get());
  const absl::Status refused = devices.Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("devices=cuda finds none"));
}

TEST(JobDevicesTest, CudaSaysWhyItHasNone) {
  JobDevices devices("cuda");
  const absl::Status opened = devices.Open();
  if (opened.ok()) GTEST_SKIP() << "this machine has a device of CUDA";
  EXPECT_TRUE(absl::IsFailedPrecondition(opened)) << opened;
  EXPECT_TRUE(devices.devices().empty());
}

}  // namespace
}  // namespace optstate::session
