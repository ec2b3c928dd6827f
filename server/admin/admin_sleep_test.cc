// Calls of the Admin service that put jobs to sleep and wake them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/admin/admin_service_fixture.h"
#include "server/supervisor/sleep/sleep_manifest.h"

namespace optstate::admin {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class AdminSleepTest : public AdminServiceTest {
 protected:
  absl::Status Sleep(const std::string& job) {
    return service_->SleepJob(job, access::UnixCaller(::geteuid()), Soon(),
                              [this](const v1::SleepProgress& progress) {
                                last_ = progress;
                                return !caller_is_gone_;
                              });
  }
  v1::SleepProgress last_;
  bool caller_is_gone_ = false;
};

TEST_F(AdminSleepTest, AJobWithoutRanksIsPutToSleep) {
  AddJob("a", 0).set_phase(v1::JOB_PHASE_READY);
  const absl::Status slept = Sleep("a");
  EXPECT_TRUE(slept.ok()) << slept;
  EXPECT_THAT(control_.calls, ElementsAre("hold a", "sleep a 17"));
  EXPECT_TRUE(last_.done());
  EXPECT_EQ(last_.bytes(), 5u);
  EXPECT_EQ(last_.bytes_total(), 10u);
  EXPECT_EQ(last_.memory_bytes(), 20u);
  EXPECT_EQ(last_.directory(), "/disk/jobs/a");
}

TEST_F(AdminSleepTest, AJobInUseIsRefusedAndReleased) {
  AddJob("busy", 2).set_phase(v1::JOB_PHASE_READY);
  absl::Status refused = Sleep("busy");
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("2 ranks are attached"));
  EXPECT_THAT(control_.calls, ElementsAre("hold busy", "release busy"));
  AddJob("failed", 0).set_phase(v1::JOB_PHASE_FAILED);
  refused = Sleep("failed");
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("FAILED"));
  AddJob("loading", 0).set_phase(v1::JOB_PHASE_LOADING);
  EXPECT_TRUE(absl::IsFailedPrecondition(Sleep("loading")));
  AddJob("hangs", 0, /*hangs=*/true);
  EXPECT_TRUE(absl::IsFailedPrecondition(Sleep("hangs")));
  EXPECT_TRUE(absl::IsNotFound(Sleep("absent")));
  EXPECT_TRUE(absl::IsInvalidArgument(Sleep("../a")));
}

TEST_F(AdminSleepTest, AnErrorOfTheCopyIsTheCalls) {
  AddJob("a", 0).set_phase(v1::JOB_PHASE_READY);
  control_.sleep_status = absl::ResourceExhaustedError("the disk is full");
  EXPECT_EQ(Sleep("a"), control_.sleep_status);
  EXPECT_FALSE(last_.done());
}

TEST_F(AdminSleepTest, ACallerThatIsGoneEndsTheCallAlone) {
  AddJob("a", 0).set_phase(v1::JOB_PHASE_READY);
  caller_is_gone_ = true;
  EXPECT_TRUE(absl::IsCancelled(Sleep("a")));
  EXPECT_THAT(control_.calls, ElementsAre("hold a", "sleep a 17"));
}

TEST_F(AdminSleepTest, ASleepingJobIsDescribedByItsFilesOnDisk) {
  GiveFiles("a");
  supervisor::JobSummary& job = control_.jobs["a"];
  job.name = "a";
  job.uid = ::geteuid();
  // The files lie below `files` in the folder of a sleeping job.
  const std::string folder = job.directory + "-asleep";
  directories_.push_back(folder);
  std::filesystem::create_directory(folder);
  std::filesystem::rename(job.directory, folder + supervisor::kFilesFolder);
  job.reason = "job \"a\" is asleep";
  job.sleep.emplace().set_directory(folder);
  const auto described = service_->GetJob("a", Operator(), Soon());
  ASSERT_TRUE(described.ok()) << described.status();
  EXPECT_EQ(described->phase(), v1::JOB_PHASE_ASLEEP);
  EXPECT_EQ(described->committed_step(), 56u);
  EXPECT_EQ(described->state_bytes(), 0u);
  EXPECT_EQ(described->sleep().directory(), folder);
  EXPECT_EQ(described->reason(), "job \"a\" is asleep");
  v1::SetJobRequest set;
  set.set_name("a");
  const absl::Status refused =
      service_->SetJob(set, access::UnixCaller(::geteuid()), Soon()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("asleep"));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      service_->VerifyJob("a", access::UnixCaller(::geteuid()), nullptr,
                          [](const v1::VerifyJobProgress&) { return true; })));
  v1::ListParametersRequest list;
  list.set_job("a");
  EXPECT_TRUE(absl::IsFailedPrecondition(
      service_->ListParameters(list, Operator(), Soon()).status()));
}

}  // namespace
}  // namespace optstate::admin
