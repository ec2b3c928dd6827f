#include "server/admin/device_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace optstate::admin {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

// Adds a job that uses a device.
void AddJob(const std::string& name, uint32_t device, v1::ListJobsReply* jobs) {
  v1::Job* job = jobs->add_jobs();
  job->set_name(name);
  v1::DeviceUpdates* updates = job->mutable_device_updates();
  updates->set_offload_fraction(0.25);
  v1::DeviceUse* use = updates->add_uses();
  use->set_index(device);
  use->set_name("a GPU");
  use->set_memory_bytes(1000);
  use->set_buffer_bytes(10);
  use->set_resident_bytes(20);
}

TEST(DeviceReportTest, JobsAreFoundBelowTheirDevices) {
  v1::ListJobsReply jobs;
  AddJob("a", 1, &jobs);
  AddJob("b", 0, &jobs);
  AddJob("c", 1, &jobs);
  jobs.add_jobs()->set_name("without devices");
  jobs.add_unanswered()->set_name("d");
  const v1::DescribeDevicesReply reply =
      DescribeDevices("cuda", std::move(jobs));
  EXPECT_EQ(reply.setting(), "cuda");
  EXPECT_EQ(reply.note(), "");
  ASSERT_THAT(reply.devices(), SizeIs(2));
  EXPECT_EQ(reply.devices(0).index(), 0u);
  EXPECT_EQ(reply.devices(1).memory_bytes(), 1000u);
  ASSERT_THAT(reply.devices(1).jobs(), SizeIs(2));
  EXPECT_EQ(reply.devices(1).jobs(1).job(), "c");
  EXPECT_EQ(reply.devices(1).jobs(1).offload_fraction(), 0.25);
  EXPECT_EQ(reply.devices(1).jobs(1).use().buffer_bytes(), 10u);
  EXPECT_EQ(reply.devices(1).jobs(1).use().resident_bytes(), 20u);
  ASSERT_THAT(reply.unanswered(), SizeIs(1));
}

TEST(DeviceReportTest, EmulatedOnesAreThereWithoutJobs) {
  const v1::DescribeDevicesReply reply = DescribeDevices("emulated:3", {});
  ASSERT_THAT(reply.devices(), SizeIs(3));
  EXPECT_THAT(reply.devices(2).name(), HasSubstr("emulated"));
  EXPECT_GT(reply.devices(2).memory_bytes(), 0u);
  EXPECT_EQ(reply.note(), "");
}

TEST(DeviceReportTest, WhereThereAreNoneItSaysWhatToDo) {
  EXPECT_THAT(DescribeDevices("none", {}).note(), HasSubstr("--devices"));
  EXPECT_THAT(DescribeDevices("cuda", {}).note(),
              HasSubstr("offload_fraction"));
}

}  // namespace
}  // namespace optstate::admin
