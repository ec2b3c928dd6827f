#include "server/session/devices/job_devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

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
