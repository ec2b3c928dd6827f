// Tests of what a job is admitted by when it is created or extended.

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/memory_available.h"
#include "server/scheduler/step_scheduler.h"
#include "server/session/job_shape.h"
#include "server/session/testing/job_harness.h"
#include "server/session/testing/two_rank_job_fixture.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

std::vector<std::string> FilesBelow(const std::string& directory) {
  std::vector<std::string> files;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(directory)) {
    files.push_back(entry.path().lexically_relative(directory));
  }
  return files;
}

using JobLimitsTest = TwoRankJobFixture;

TEST_F(JobLimitsTest, AdmissionFailureLeavesNothingBehind) {
  LayoutSpec huge;
  huge.groups = {{}};
  huge.parameters = {MakeParameter("huge", int64_t{1} << 42)};
  harness_.SetLayout(huge);
  const absl::Status status = harness_.Register(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("needs 52785"));  // 3 * 2^44 + ...
  EXPECT_THAT(status.message(), HasSubstr("are left"));
  EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_EMPTY);
  EXPECT_THAT(FilesBelow(harness_.directory()),
              UnorderedElementsAre("admission.lock", "boot"));
  harness_.SetLayout(SmallLayout());
  EXPECT_TRUE(harness_.Register(0).ok());
}

TEST_F(JobLimitsTest, LimitsAreToldByName) {
  JobHarness::Setup setup = TwoRanks();
  setup.limits.set_job_state_bytes_max(270000);
  JobHarness job_limit(setup);
  absl::Status status = job_limit.Register(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("needs 331168 bytes"));
  EXPECT_THAT(status.message(), HasSubstr("job_state_bytes_max"));

  setup.limits.set_job_state_bytes_max(0);
  setup.limits.set_state_bytes_max(350000);
  JobHarness all_limit(setup);
  ASSERT_TRUE(all_limit.Register(0).ok());
  // An extension is admitted like a new job: what it adds does not fit.
  all_limit.SetLayout(ExtendedLayout());
  status = all_limit.Register(0, /*extend=*/true).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("limits.state_bytes_max"));
  // The job is unchanged.
  all_limit.SetLayout(SmallLayout());
  all_limit.Start(all_limit.RandomTensors(1));
  all_limit.Step(1, all_limit.RandomTensors(2), CommitOf(1, groups_));

  setup.limits.set_state_bytes_max(0);
  setup.limits.set_memory_reserve_bytes(UINT64_MAX);
  JobHarness memory_limit(setup);
  status = memory_limit.Register(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("memory"));
  EXPECT_THAT(status.message(), HasSubstr("0 bytes (0.0 MiB) are left"));
}

// The gradients of a rank whose wire has no memory of its own are files beside
// the state.
TEST_F(JobLimitsTest, WhatRanksStageIsStateToo) {
  constexpr uint64_t kTooMuch = 1 << 20;
  JobHarness::Setup setup = TwoRanks();
  setup.limits.set_state_bytes_max(500'000);
  JobHarness all_limit(setup);
  ASSERT_TRUE(all_limit.Register(0).ok());
  bool present = true;
  absl::Status status =
      all_limit.job().MakeStaging(0, 7, kTooMuch, &present).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr("limits.state_bytes_max"));
  EXPECT_FALSE(std::filesystem::exists(all_limit.job().StagingPath(0, 7)));
  ASSERT_TRUE(all_limit.job().MakeStaging(0, 7, 4096, &present).ok());
  EXPECT_FALSE(present);
  // One that is there is opened, whatever is left by now.
  v1::Limits less;
  less.set_state_bytes_max(1);
  all_limit.job().SetLimits(less);
  ASSERT_TRUE(all_limit.job().MakeStaging(0, 7, 4096, &present).ok());
  EXPECT_TRUE(present);

  setup.limits.set_state_bytes_max(0);
  setup.limits.set_user_state_bytes_max(500'000);
  setup.uid = 61711;  // not the one of this test, and not root
  JobHarness of_user(setup);
  ASSERT_TRUE(of_user.Register(0).ok());
  status = of_user.job().MakeStaging(0, 7, kTooMuch, &present).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(),
              HasSubstr("limit of the jobs of uid 61711: the job needs 1048576 "
                        "bytes"));
}

// A message of a hundred kilobytes asks for tables of a gigabyte.
TEST_F(JobLimitsTest, WhatItsTablesTakeIsAskedForBeforeTheyAreMade) {
  LayoutSpec layout;
  layout.groups.resize(1);
  for (int i = 0; i < 10'000; ++i) {
    layout.parameters.push_back(MakeParameter(absl::StrCat("p", i), 1));
  }
  JobHarness::Setup setup;
  setup.layout = std::move(layout);
  setup.world_size = kWorldSizeMax;
  setup.partition = PartitionMode::kReplicated;
  // The room suffices for the state and for memory of the engine itself.
  const uint64_t available = AvailableMemoryBytes().value();
  constexpr uint64_t kRoom = 200 << 20;
  if (available < 2 * kRoom) GTEST_SKIP() << available << " bytes of memory";
  setup.limits.set_memory_reserve_bytes(available - kRoom);
  JobHarness harness(setup);
  const absl::Status status = harness.Register(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr("memory_reserve_bytes"));
}

// The copy of the step counts is one, however many ranks there are.
TEST(TableBytesTest, AParameterHasACountOfItsOwn) {
  const auto bytes_of_parameter = [](uint32_t ranks) {
    const auto bytes = [ranks](int parameters) {
      LayoutSpec layout;
      layout.groups.resize(1);
      for (int i = 0; i < parameters; ++i) {
        layout.parameters.push_back(MakeParameter(absl::StrCat("p", i), 1));
      }
      JobDescription description;
      description.layout = *Layout::Make(layout);
      description.world_size = ranks;
      description.partition = PartitionMode::kReplicated;
      return TableBytes(description);
    };
    return bytes(101) - bytes(100);
  };
  EXPECT_EQ(2 * bytes_of_parameter(1) - bytes_of_parameter(2), sizeof(int64_t));
}

// Each worker needs four times the largest parameter, beside files of twice its
// size: without admission an engine would be killed inside its first step.
TEST_F(JobLimitsTest, TheWorkspaceOfWholeParametersIsAdmitted) {
  JobHarness::Setup setup;
  setup.layout.optimizer = OptimizerKind::kMuon;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("square", 1 << 20)};
  setup.layout.parameters[0].shape = {1 << 10, 1 << 10};
  setup.workers = 32;
  const Layout layout = *Layout::Make(setup.layout);
  const uint64_t workspace =
      scheduler::StepScheduler::WorkspaceBytes(layout, 32);
  const uint64_t files = scheduler::StepScheduler::RedoBytes(layout, 32);
  ASSERT_GT(workspace, files);
  const uint64_t available = AvailableMemoryBytes().value();
  const uint64_t room = files + workspace / 2;
  if (available < 3 * room) GTEST_SKIP() << available << " bytes of memory";
  setup.limits.set_memory_reserve_bytes(available - room);
  JobHarness harness(setup);
  const absl::Status status = harness.Register(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr("memory_reserve_bytes"));
  EXPECT_THAT(FilesBelow(harness.directory()),
              UnorderedElementsAre("admission.lock", "boot"));
}

}  // namespace
}  // namespace optstate::session
