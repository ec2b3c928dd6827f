#include "server/admin/shown_jobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "optstate/v1/admin.pb.h"

namespace optstate::admin {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::set<std::string> kOpen = {"open"};

v1::DescribeTiersReply Tiers() {
  v1::DescribeTiersReply tiers;
  v1::DirectoryTier& directory = *tiers.add_directories();
  directory.set_used_bytes(30);
  for (const char* job : {"secret", "open", "of-a-former-daemon"}) {
    tiers.mutable_memory()->add_jobs()->set_job(job);
    directory.add_jobs()->set_job(job);
  }
  return tiers;
}

v1::DescribeDevicesReply Devices() {
  v1::DescribeDevicesReply devices;
  for (const char* job : {"open", "secret"}) {
    devices.add_unanswered()->set_name(job);
  }
  for (int i = 0; i < 2; ++i) {
    v1::DeviceReport& device = *devices.add_devices();
    for (const char* job : {"open", "secret"}) device.add_jobs()->set_job(job);
  }
  return devices;
}

TEST(ShownJobsTest, TiersHaveTheShownJobsInMemoryAndInEachDirectory) {
  v1::DescribeTiersReply tiers = Tiers();
  ShowJobs(kOpen, &tiers);
  ASSERT_EQ(tiers.memory().jobs_size(), 1);
  EXPECT_EQ(tiers.memory().jobs(0).job(), "open");
  ASSERT_EQ(tiers.directories_size(), 1);
  ASSERT_EQ(tiers.directories(0).jobs_size(), 1);
  EXPECT_EQ(tiers.directories(0).jobs(0).job(), "open");
  // Sums stay.
  EXPECT_EQ(tiers.directories(0).used_bytes(), 30u);
}

TEST(ShownJobsTest, DevicesHaveTheShownJobsOnEachOfThem) {
  v1::DescribeDevicesReply devices = Devices();
  ShowJobs(kOpen, &devices);
  ASSERT_EQ(devices.devices_size(), 2);
  for (const v1::DeviceReport& device : devices.devices()) {
    ASSERT_EQ(device.jobs_size(), 1);
    EXPECT_EQ(device.jobs(0).job(), "open");
  }
  ASSERT_EQ(devices.unanswered_size(), 1);
  EXPECT_EQ(devices.unanswered(0).name(), "open");
}

TEST(ShownJobsTest, AReportForAllNamesNoPrivateJobAnywhere) {
  v1::NodeReport report;
  v1::Job& open = *report.add_jobs();
  open.set_name("open");
  open.set_phase(v1::JOB_PHASE_READY);
  v1::Job& secret = *report.add_jobs();
  secret.set_name("secret");
  secret.set_uid(4711);
  secret.set_reason("its engine is gone");
  secret.set_phase(v1::JOB_PHASE_FAILED);
  secret.mutable_access()->set_is_private(true);
  secret.mutable_access()->set_group("the-group");
  secret.mutable_access()->add_readers("a-reader");
  for (const char* job : {"secret", "open"}) {
    v1::UnansweredJob& unanswered = *report.mutable_status()->add_unanswered();
    unanswered.set_name(job);
    unanswered.set_reason(std::string("no answer of ") + job);
  }
  report.mutable_status()->mutable_upgrade()->add_problems(
      "job secret: it keeps its engine");
  *report.mutable_tiers() = Tiers();
  *report.mutable_devices() = Devices();
  LeaveOutPrivateJobs(&report);
  const std::string text = report.ShortDebugString();
  for (const char* hidden : {"secret", "4711", "the-group", "a-reader",
                             "its engine is gone", "of-a-former-daemon"}) {
    EXPECT_THAT(text, Not(HasSubstr(hidden)));
  }
  // The jobs that sums are made of are there.
  ASSERT_EQ(report.jobs_size(), 2);
  EXPECT_EQ(report.jobs(0).name(), "open");
  EXPECT_EQ(report.jobs(1).phase(), v1::JOB_PHASE_FAILED);
  EXPECT_EQ(report.status().unanswered_size(), 2);
  EXPECT_EQ(report.status().unanswered(1).name(), "open");
  EXPECT_EQ(report.status().upgrade().problems_size(), 1);
  EXPECT_EQ(report.tiers().directories(0).jobs_size(), 1);
  EXPECT_EQ(report.devices().devices(0).jobs_size(), 1);
}

}  // namespace
}  // namespace optstate::admin
