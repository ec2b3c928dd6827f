// optctl describe device and get devices, against real daemons with emulated
// devices and without any.

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

class OptctlDeviceTest : public OptctlTest {
 protected:
  void SetUp() override { Start("emulated:2"); }

  void Start(const std::string& devices) {
    daemon_ = nullptr;
    TestDaemon::Options options;
    options.flags = {"--devices", devices};
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  v1::DescribeDevicesReply Devices() const {
    const Ran ran = Optctl("describe device -o json");
    EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
    v1::DescribeDevicesReply reply;
    EXPECT_TRUE(
        google::protobuf::util::JsonStringToMessage(ran.output, &reply).ok())
        << ran.output;
    return reply;
  }
  void ExpectText(const std::string& arguments, const std::string& text) const {
    const Ran ran = Optctl(arguments);
    EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << text << ran.output;
  }
};

TEST_F(OptctlDeviceTest, DevicesAreDescribedWithTheirJobs) {
  client::StorageOptions storage;
  storage.offload_fraction = 0;
  const auto shared = Train("shared", storage);
  const auto plain = Train("plain");
  const v1::DescribeDevicesReply reply = Devices();
  EXPECT_EQ(reply.setting(), "emulated:2");
  ASSERT_EQ(reply.devices_size(), 2);
  uint64_t elements = 0;
  for (const v1::DeviceReport& device : reply.devices()) {
    EXPECT_GT(device.memory_bytes(), 0u);
    ASSERT_EQ(device.jobs_size(), 1);
    const v1::DeviceJob& job = device.jobs(0);
    EXPECT_EQ(job.job(), "shared");
    EXPECT_EQ(job.offload_fraction(), 0);
    EXPECT_GT(job.use().buffers(), 0u);
    EXPECT_GT(job.use().buffer_bytes(), 0u);
    EXPECT_EQ(job.use().problem(), "");
    EXPECT_EQ(job.use().elements() > 0, job.use().elements_per_s() > 0);
    elements += job.use().elements();
  }
  EXPECT_GT(elements, 0u);
  for (const char* text :
       {"device 1", "emulated device 1", "job shared", "100% by devices",
        "as much pinned on the host", "million elements/s"}) {
    ExpectText("describe device", text);
  }
  ExpectText("get devices", "emulated device 0");
}

TEST_F(OptctlDeviceTest, WhatChangesWhileItTrainsIsSeen) {
  const auto session = Train("gpt");
  EXPECT_EQ(Devices().devices(0).jobs_size(), 0);
  ASSERT_EQ(Optctl("set job gpt offload_fraction=0.5").exit_code, kExitOk);
  ASSERT_TRUE(Step(*session, 2).ok());
  ASSERT_EQ(Devices().devices(0).jobs_size(), 1);
  EXPECT_EQ(Devices().devices(0).jobs(0).offload_fraction(), 0.5);
  ASSERT_EQ(Optctl("set job gpt offload_fraction=1").exit_code, kExitOk);
  EXPECT_EQ(Devices().devices(0).jobs_size(), 0) << "the buffers are freed";
}

TEST_F(OptctlDeviceTest, AutoTriesFractionsWhileItTrains) {
  const auto session = Train("gpt");
  std::atomic<bool> has_ended = false;
  std::thread trainer([&] {
    for (uint64_t step = 2; !has_ended; ++step) {
      EXPECT_TRUE(Step(*session, step).ok()) << step;
    }
  });
  const Ran ran = Optctl("set job gpt offload_fraction=auto");
  has_ended = true;
  trainer.join();
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, " is the fastest of "))
      << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "% by devices")) << ran.output;
}

TEST_F(OptctlDeviceTest, AutoIsSetByItselfAndNeedsADevice) {
  const auto session = Train("gpt");
  const Ran both = Optctl("set job gpt offload_fraction=auto device_budget=0");
  EXPECT_EQ(both.exit_code, kExitUsage) << both.output;
  EXPECT_TRUE(absl::StrContains(both.output, "by itself")) << both.output;
  const Ran unknown = Optctl("set job nobody offload_fraction=auto");
  EXPECT_EQ(unknown.exit_code, kExitNotFound) << unknown.output;
}

TEST_F(OptctlDeviceTest, RecordsMayStayThere) {
  client::StorageOptions storage;
  storage.offload_fraction = 0;
  storage.device_budget_bytes = 4 << 20;
  const auto session = Train("gpt", storage);
  ASSERT_TRUE(session != nullptr);
  ExpectText("set job gpt device_budget=8MiB", "device_budget 8.0 MiB");
  ASSERT_TRUE(Step(*session, 2).ok());
  ExpectText("set job gpt device_budget=0", "100% by devices");
  ASSERT_TRUE(Step(*session, 3).ok());
  ASSERT_EQ(Optctl("set job gpt device_budget=8MiB").exit_code, kExitOk);
  // The budget waits for a smaller fraction.
  ASSERT_EQ(Optctl("set job gpt offload_fraction=1").exit_code, kExitOk);
  const Ran refused = Optctl("set job gpt device_budget=16MiB");
  EXPECT_EQ(refused.exit_code, kExitUsage) << refused.output;
  EXPECT_TRUE(absl::StrContains(refused.output, "offload_fraction below 1"))
      << refused.output;
  ASSERT_EQ(Optctl("set job gpt offload_fraction=1 device_budget=0").exit_code,
            kExitOk);
}

TEST_F(OptctlDeviceTest, ADaemonWithoutDevicesSaysSo) {
  ASSERT_NO_FATAL_FAILURE(Start("none"));
  EXPECT_EQ(Devices().devices_size(), 0);
  ExpectText("describe device", "this daemon has no devices");
  ExpectText("get devices", "start optstated with --devices");
  ASSERT_NO_FATAL_FAILURE(Start("cuda"));
  ExpectText("describe device", "no job uses a device");
}

}  // namespace
}  // namespace optstate::ctl
