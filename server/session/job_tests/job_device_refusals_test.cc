// Shares of the updates that devices cannot have: jobs are refused, or stay as
// they were.

#include <cmath>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/device_jobs.h"
#include "server/session/testing/job_harness.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

absl::Status RefusalOf(const JobHarness::Setup& setup) {
  JobHarness job(setup);
  absl::Status status = job.Register(0).status();
  EXPECT_FALSE(job.job().layout().ok()) << "nothing of the job is left";
  return status;
}

TEST(JobDeviceUpdatesRefusalTest, ANodeWithoutDevicesSaysWhatToDo) {
  JobHarness::Setup setup = SetupOf(0.5);
  setup.devices = "none";
  const absl::Status refused = RefusalOf(setup);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("start optstated with --devices"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("offload_fraction"));
}

TEST(JobDeviceUpdatesRefusalTest, AFractionOutsideIsRefused) {
  for (const double fraction : {-0.1, 1.5, std::nan("")}) {
    const absl::Status refused = RefusalOf(SetupOf(fraction));
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("from 0 to 1"));
  }
  JobHarness job(SetupOf(1));
  job.Start(job.RandomTensors(kSeed));
  EXPECT_TRUE(absl::IsInvalidArgument(SetFraction(&job, 2).status()));
  EXPECT_EQ(job.job().Describe().storage().offload_fraction(), 1);
}

TEST(JobDeviceUpdatesRefusalTest, ABudgetIsForRecordsThatDevicesUpdate) {
  JobHarness::Setup setup = KeepingSetup(1 << 20);
  setup.storage.set_offload_fraction(1);
  const absl::Status refused = RefusalOf(setup);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("device_budget"));
  setup.storage.clear_device_budget_bytes();
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  EXPECT_TRUE(absl::IsInvalidArgument(SetBudget(&job, 1 << 20).status()));
  EXPECT_EQ(job.job().Describe().storage().device_budget_bytes(), 0u);
}

TEST(JobDeviceUpdatesRefusalTest, ADeviceWithoutMemoryIsRefused) {
  const auto runtime =
      accelerator::MakeEmulatedRuntime({.memory_bytes = 1 << 20});
  JobHarness::Setup setup = SetupOf(0.5);
  setup.device_runtime = runtime.get();
  const absl::Status refused = RefusalOf(setup);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  setup.storage.set_offload_fraction(1);
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  EXPECT_TRUE(absl::IsResourceExhausted(SetFraction(&job, 0.5).status()));
  TakeSteps(&job, 1, 2);
  EXPECT_EQ(job.job().Describe().storage().offload_fraction(), 1);
}

}  // namespace
}  // namespace optstate::session
