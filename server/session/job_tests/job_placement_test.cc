// Where a new job's records lie: what "auto" chooses, the least budget, and the
// split over several directories.

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kSeed = 12;
constexpr uint64_t kSubGroup = 8192;
constexpr uint64_t kRecords = 12;
constexpr uint64_t kFrame = kSubGroup * 12;

JobHarness::Setup SetupOf(v1::Placement placement) {
  JobHarness::Setup setup;
  setup.layout.groups.resize(1);
  setup.layout.parameters = {
      MakeParameter("a", 7 * kSubGroup, 0, DType::kBFloat16),
      MakeParameter("b", 5 * kSubGroup, 0, DType::kBFloat16)};
  setup.subgroup_elements = kSubGroup;
  setup.storage.set_placement(placement);
  return setup;
}

void Train(JobHarness* job, uint64_t first, uint64_t last) {
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  for (uint64_t step = first; step <= last; ++step) {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    job->Step(step, job->RandomTensors(kSeed + step), spec);
  }
}

v1::StorageSettings StorageOf(JobHarness* job) {
  return job->job().Describe().storage();
}

// Returns what such a job in memory takes of it.
uint64_t BytesInMemory() {
  JobHarness job(SetupOf(v1::PLACEMENT_HOST));
  job.Start(job.RandomTensors(kSeed));
  return job.job().Describe().state_bytes();
}

absl::Status Refused(JobHarness::Setup setup) {
  JobHarness job(std::move(setup));
  return job.job().Register(job.SpecOf(0)).status();
}

TEST(JobPlacementTest, AutoTakesMemoryThatIsThere) {
  JobHarness::Setup setup = SetupOf(v1::PLACEMENT_AUTO);
  setup.storage.set_host_budget_bytes(5 * kFrame);
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  EXPECT_EQ(StorageOf(&job).placement(), v1::PLACEMENT_HOST);
  EXPECT_THAT(StorageOf(&job).placement_reason(),
              HasSubstr("auto: the state fits in memory"));
  EXPECT_FALSE(job.job().Describe().has_disk());
  // The next engine and the next session know it so.
  job.Close();
  ASSERT_TRUE(job.Open().ok());
  ASSERT_TRUE(job.Register(0).ok());
  EXPECT_NE(StorageOf(&job).placement_reason(), "");
}

TEST(JobPlacementTest, AutoTakesTheDiskWithAllTheMemoryThatIsLeft) {
  JobHarness in_memory(SetupOf(v1::PLACEMENT_HOST));
  JobHarness::Setup setup = SetupOf(v1::PLACEMENT_AUTO);
  setup.limits.set_state_bytes_max(BytesInMemory() - 4 * kFrame);
  setup.nvme.set_job_host_budget_bytes(uint64_t{1} << 30);
  JobHarness job(setup);
  for (JobHarness* one : {&in_memory, &job}) {
    one->Start(one->RandomTensors(kSeed));
    Train(one, 1, 3);
  }
  const v1::Job described = job.job().Describe();
  EXPECT_EQ(described.storage().placement(), v1::PLACEMENT_NVME);
  EXPECT_GE(described.disk().frames(), 3u);
  EXPECT_LT(described.disk().frames(), kRecords);
  EXPECT_EQ(described.storage().host_budget_bytes(),
            described.disk().frames() * described.disk().frame_bytes());
  EXPECT_THAT(described.storage().placement_reason(),
              HasSubstr(absl::StrCat(described.disk().frames(), " of ",
                                     kRecords, " records")));
  EXPECT_EQ(job.StateBytes(), in_memory.StateBytes());
  // One frame more would not have been admitted.
  setup.storage.set_placement(v1::PLACEMENT_NVME);
  setup.storage.set_host_budget_bytes(described.storage().host_budget_bytes() +
                                      kFrame);
  EXPECT_TRUE(absl::IsResourceExhausted(Refused(setup)));
  // Less than three records are refused, with what they need.
  setup.storage = SetupOf(v1::PLACEMENT_AUTO).storage;
  setup.limits.set_state_bytes_max(3 * kFrame);
  const absl::Status refused = Refused(setup);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("the job needs "));
}

TEST(JobPlacementTest, AutoRespectsTheNodesBudgetAndTheJobs) {
  JobHarness::Setup setup = SetupOf(v1::PLACEMENT_AUTO);
  setup.limits.set_state_bytes_max(BytesInMemory() - 4 * kFrame);
  setup.nvme.set_host_budget_bytes(4 * kFrame + 1);
  {
    JobHarness job(setup);
    job.Start(job.RandomTensors(kSeed));
    EXPECT_EQ(StorageOf(&job).host_budget_bytes(), 4 * kFrame);
  }
  setup.storage.set_host_budget_bytes(3 * kFrame + 7);
  {
    JobHarness job(setup);
    job.Start(job.RandomTensors(kSeed));
    EXPECT_EQ(StorageOf(&job).host_budget_bytes(), 3 * kFrame + 7);
  }
  setup.nvme.set_host_budget_bytes(3 * kFrame - 1);
  const absl::Status refused = Refused(setup);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("nvme.host_budget_bytes"));
}

TEST(JobPlacementTest, AutoKeepsTheDurabilityWhereverItPutsTheJob) {
  JobHarness::Setup setup = SetupOf(v1::PLACEMENT_AUTO);
  setup.storage.set_durability(v1::DURABILITY_KIND_STEP);
  const uint64_t limit = BytesInMemory() - 4 * kFrame;
  for (const bool fits : {true, false}) {
    if (!fits) setup.limits.set_state_bytes_max(limit);
    JobHarness job(setup);
    job.Start(job.RandomTensors(kSeed));
    Train(&job, 1, 2);
    EXPECT_EQ(StorageOf(&job).placement(),
              fits ? v1::PLACEMENT_HOST : v1::PLACEMENT_NVME);
    EXPECT_EQ(job.job().Describe().disk().durable_step(), 2u);
    job.Close();
    job.DropMemory();
    ASSERT_TRUE(job.Open().ok());
    ASSERT_TRUE(job.Register(0).ok());
    EXPECT_EQ(job.job().Describe().committed_step(), 2u);
    EXPECT_NE(StorageOf(&job).placement_reason(), "");
  }
  // Durable records in memory are frames, of which the node has too few.
  setup.limits.clear_state_bytes_max();
  setup.nvme.set_host_budget_bytes(4 * kFrame);
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  EXPECT_EQ(StorageOf(&job).placement(), v1::PLACEMENT_NVME);
  EXPECT_EQ(StorageOf(&job).host_budget_bytes(), 4 * kFrame);
}

TEST(JobPlacementTest, ABudgetForLessThanThreeRecordsIsRefused) {
  JobHarness::Setup setup = SetupOf(v1::PLACEMENT_NVME);
  for (const uint64_t budget : {uint64_t{1}, 3 * kFrame - 1}) {
    setup.storage.set_host_budget_bytes(budget);
    const absl::Status refused = Refused(setup);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(refused.message(),
                HasSubstr(absl::StrCat("set at least ", 3 * kFrame)));
  }
  setup.storage.set_host_budget_bytes(3 * kFrame);
  EXPECT_TRUE(Refused(setup).ok());
  // The node's default becomes the least.
  setup.storage.clear_host_budget_bytes();
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  EXPECT_EQ(StorageOf(&job).host_budget_bytes(), 3 * kFrame);
}

class JobDirectoriesTest : public testing::TestWithParam<v1::DurabilityKind> {
 protected:
  static JobHarness::Setup Weighted() {
    JobHarness::Setup setup = SetupOf(v1::PLACEMENT_NVME);
    setup.disks = 2;
    setup.storage.set_durability(GetParam());
    setup.nvme.add_directory_weights(2);
    setup.nvme.add_directory_weights(6);
    return setup;
  }
  static uint64_t RecordBytesIn(const JobHarness& job, int disk) {
    return fs::file_size(job.Disks()[disk] + "/jobs/test/records");
  }
};

TEST_P(JobDirectoriesTest, RecordsAreSplitByWeightsThatStayTheJobs) {
  JobHarness job(Weighted());
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  EXPECT_THAT(StorageOf(&job).directory_weights(), ElementsAre(1, 3));
  EXPECT_EQ(RecordBytesIn(job, 1), 3 * RecordBytesIn(job, 0));
  const auto bytes = job.StateBytes();
  // Other weights are for other jobs.
  job.setup().nvme.clear_directory_weights();
  job.Close();
  if (GetParam() == v1::DURABILITY_KIND_STEP) job.DropMemory();
  ASSERT_TRUE(job.Open().ok());
  ASSERT_TRUE(job.Register(0).ok());
  EXPECT_THAT(StorageOf(&job).directory_weights(), ElementsAre(1, 3));
  EXPECT_EQ(job.StateBytes(), bytes);
}

INSTANTIATE_TEST_SUITE_P(Durability, JobDirectoriesTest,
                         testing::Values(v1::DURABILITY_KIND_NONE,
                                         v1::DURABILITY_KIND_STEP));

TEST(JobPlacementTest, EqualWeightsAreNone) {
  JobHarness::Setup setup = SetupOf(v1::PLACEMENT_NVME);
  setup.disks = 2;
  setup.nvme.add_directory_weights(5);
  setup.nvme.add_directory_weights(5);
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  EXPECT_THAT(StorageOf(&job).directory_weights(), IsEmpty());
}

// Measured once, for all jobs.
TEST(JobPlacementTest, WithoutWeightsTheDirectoriesAreMeasured) {
  JobHarness::Setup setup = SetupOf(v1::PLACEMENT_NVME);
  setup.disks = 2;
  JobHarness job(setup);
  EXPECT_FALSE(fs::exists(job.directory() + "/disk_rates"));
  job.Start(job.RandomTensors(kSeed));
  EXPECT_TRUE(fs::exists(job.directory() + "/disk_rates"));
  for (const std::string& disk : job.Disks()) {
    EXPECT_FALSE(fs::exists(disk + "/.bandwidth"));
  }
}

TEST(JobPlacementTest, ADirectoryHasNoMoreThanItsLimit) {
  JobHarness::Setup setup = SetupOf(v1::PLACEMENT_NVME);
  setup.nvme.add_directory_bytes_max(kRecords * kFrame);
  const absl::Status refused = Refused(setup);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("nvme.directory_bytes_max"));
  setup.nvme.set_directory_bytes_max(0, kRecords * kFrame + (1 << 20));
  EXPECT_TRUE(Refused(setup).ok());
}

}  // namespace
}  // namespace optstate::session
