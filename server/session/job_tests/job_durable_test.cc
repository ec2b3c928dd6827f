// Jobs whose records are on disk: the same bits as in memory, and durable
// steps.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

constexpr uint64_t kSeed = 7;

JobHarness::Setup SetupOf(v1::Placement placement, DType dtype,
                          v1::DurabilityKind durability) {
  JobHarness::Setup setup;
  setup.layout.groups.resize(1);
  setup.layout.parameters = {
      MakeParameter("a", 50'000, 0, dtype, dtype),
      MakeParameter("b", 7, 0, dtype, dtype),
      MakeParameter("c", 33'333, 0, dtype, dtype),
  };
  setup.storage.set_placement(placement);
  setup.storage.set_durability(durability);
  return setup;
}

CommitSpec SpecOf(uint64_t step, absl::Span<const Hyperparams> groups) {
  CommitSpec spec;
  spec.step = step;
  spec.groups = groups;
  return spec;
}

// Takes steps [first, last] of one job.
void Train(JobHarness* job, uint64_t first, uint64_t last) {
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  for (uint64_t step = first; step <= last; ++step) {
    job->Step(step, job->RandomTensors(kSeed + step), SpecOf(step, groups));
  }
}

std::string FolderOf(const JobHarness& job) {
  return job.disk() + "/jobs/test";
}

class JobDurableTest : public testing::TestWithParam<DType> {};

TEST_P(JobDurableTest, SwappedRecordsGiveTheSameBits) {
  JobHarness in_memory(
      SetupOf(v1::PLACEMENT_HOST, GetParam(), v1::DURABILITY_KIND_UNSPECIFIED));
  JobHarness swapped(
      SetupOf(v1::PLACEMENT_NVME, GetParam(), v1::DURABILITY_KIND_UNSPECIFIED));
  for (JobHarness* job : {&in_memory, &swapped}) {
    job->Start(job->RandomTensors(kSeed));
    Train(job, 1, 5);
  }
  EXPECT_EQ(swapped.StateBytes(), in_memory.StateBytes());
}

// Runs a job that loses power three times beside one in memory that does not.
void LosePower(v1::Placement placement, DType dtype, bool has_device = false) {
  JobHarness in_memory(
      SetupOf(v1::PLACEMENT_HOST, dtype, v1::DURABILITY_KIND_UNSPECIFIED));
  JobHarness::Setup setup = SetupOf(placement, dtype, v1::DURABILITY_KIND_STEP);
  setup.has_device = has_device;
  JobHarness durable(setup);
  for (JobHarness* job : {&in_memory, &durable}) {
    job->Start(job->RandomTensors(kSeed));
    Train(job, 1, 3);
  }
  for (uint64_t step = 4; step <= 8; step += 2) {
    durable.Close();
    durable.DropMemory();
    ASSERT_TRUE(durable.Open().ok());
    durable.AttachAll();
    EXPECT_EQ(durable.job().Describe().committed_step(), step - 1);
    EXPECT_EQ(durable.StateBytes(), in_memory.StateBytes());
    for (JobHarness* job : {&in_memory, &durable}) Train(job, step, step + 1);
    EXPECT_EQ(durable.StateBytes(), in_memory.StateBytes());
  }
}

TEST_P(JobDurableTest, APowerCutLeavesTheLastDurableStep) {
  ASSERT_NO_FATAL_FAILURE(LosePower(v1::PLACEMENT_NVME, GetParam()));
}

TEST_P(JobDurableTest, SoItDoesOfAJobThatLiesInMemoryWhole) {
  ASSERT_NO_FATAL_FAILURE(LosePower(v1::PLACEMENT_HOST, GetParam()));
}

TEST_P(JobDurableTest, SoItDoesOfAJobWithRecordsOnADevice) {
  ASSERT_NO_FATAL_FAILURE(LosePower(v1::PLACEMENT_NVME, GetParam(), true));
}

// Zeros in their place would be durable after the next step.
TEST(JobDurabilityTest, FramesThatAreLostAreNotMadeAnew) {
  for (const auto durability :
       {v1::DURABILITY_KIND_STEP, v1::DURABILITY_KIND_UNSPECIFIED}) {
    for (const std::string file : {"frames", "frame_table"}) {
      JobHarness job(SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, durability));
      job.Start(job.RandomTensors(kSeed));
      Train(&job, 1, 2);
      const std::string state = job.StateBytes();
      job.Close();
      const std::string path = job.directory() + "/state/" + file;
      std::filesystem::rename(path, path + "-aside");
      const absl::Status status = job.Open();
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_THAT(status.message(), testing::HasSubstr(path));
      EXPECT_EQ(status.message().find("Delete the job") == std::string::npos,
                durability == v1::DURABILITY_KIND_STEP);
      EXPECT_TRUE(std::filesystem::exists(FolderOf(job) + "/records"));
      std::filesystem::rename(path + "-aside", path);
      ASSERT_TRUE(job.Open().ok());
      job.AttachAll();
      EXPECT_EQ(job.StateBytes(), state);
    }
  }
}

std::string NoteOf(const JobHarness& job) {
  return job.directory() + "/to_durable";
}

// Asks the next engine for the durable step, as `optctl recover` does.
void LeaveNote(const JobHarness& job) {
  const std::ofstream note(NoteOf(job));
  ASSERT_TRUE(note.good());
}

// The memory is that of step 5, the disk that of step 3.
TEST(JobDurabilityTest, MemoryIsGivenUpForTheDurableStepOnRequest) {
  JobHarness::Setup setup =
      SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, v1::DURABILITY_KIND_EVERY);
  setup.storage.set_every_steps(1000);
  JobHarness job(setup);
  JobHarness in_memory(SetupOf(v1::PLACEMENT_HOST, DType::kFloat32,
                               v1::DURABILITY_KIND_UNSPECIFIED));
  for (JobHarness* each : {&job, &in_memory}) {
    each->Start(each->RandomTensors(kSeed));
    Train(each, 1, 3);
  }
  job.Close();
  const std::string commits = FolderOf(job) + "/commits";
  std::filesystem::copy_file(commits, commits + "-aside");
  ASSERT_TRUE(job.Open().ok());
  job.AttachAll();
  Train(&job, 4, 5);
  job.Close();
  // An orderly end makes step 5 durable, a kill does not.
  std::filesystem::rename(commits + "-aside", commits);
  LeaveNote(job);
  ASSERT_TRUE(job.Open().ok());
  job.AttachAll();
  EXPECT_EQ(job.job().Describe().committed_step(), 3u);
  EXPECT_EQ(job.StateBytes(), in_memory.StateBytes());
  EXPECT_FALSE(std::filesystem::exists(NoteOf(job)));
  for (JobHarness* each : {&job, &in_memory}) Train(each, 4, 5);
  EXPECT_EQ(job.StateBytes(), in_memory.StateBytes());
}

TEST(JobDurabilityTest, DamagedMemoryNamesTheWayBack) {
  JobHarness job(
      SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, v1::DURABILITY_KIND_STEP));
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  const std::string state = job.StateBytes();
  job.Close();
  std::filesystem::resize_file(job.directory() + "/state/control", 100);
  const absl::Status damaged = job.Open();
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_THAT(damaged.message(), testing::HasSubstr("--to-durable"));
  LeaveNote(job);
  ASSERT_TRUE(job.Open().ok());
  job.AttachAll();
  EXPECT_EQ(job.StateBytes(), state);
}

// The files of a state directory on a disk may be of different steps then.
TEST(JobDurabilityTest, MemoryOfAFormerStartOfTheMachineIsGivenUp) {
  JobHarness job(
      SetupOf(v1::PLACEMENT_HOST, DType::kFloat32, v1::DURABILITY_KIND_STEP));
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  const std::string state = job.StateBytes();
  job.Close();
  std::filesystem::resize_file(job.directory() + "/state/control", 100);
  std::ofstream(job.directory() + "/boot") << "another\n";
  ASSERT_EQ(job.Open(), absl::OkStatus());
  job.AttachAll();
  EXPECT_EQ(job.StateBytes(), state);
  // The note is of this start now.
  job.Close();
  ASSERT_EQ(job.Open(), absl::OkStatus());
}

TEST(JobDurabilityTest, MemoryOfAFormerStartIsRefusedWithoutADurableStep) {
  JobHarness job(SetupOf(v1::PLACEMENT_HOST, DType::kFloat32,
                         v1::DURABILITY_KIND_UNSPECIFIED));
  job.Start(job.RandomTensors(kSeed));
  job.Close();
  std::ofstream(job.directory() + "/boot") << "another\n";
  for (int i = 0; i < 2; ++i) {
    const absl::Status refused = job.Open();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
    EXPECT_THAT(refused.message(), testing::HasSubstr("optctl delete job"));
  }
}

TEST(JobDurabilityTest, MemoryThatIsOlderThanTheDurableStepIsRefused) {
  JobHarness job(
      SetupOf(v1::PLACEMENT_HOST, DType::kFloat32, v1::DURABILITY_KIND_STEP));
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  job.Close();
  const std::filesystem::path state = job.directory() + "/state";
  std::filesystem::copy(state, job.directory() + "/aside",
                        std::filesystem::copy_options::recursive);
  ASSERT_EQ(job.Open(), absl::OkStatus());
  job.AttachAll();
  Train(&job, 3, 3);
  const std::string newest = job.StateBytes();
  job.Close();
  std::filesystem::remove_all(state);
  std::filesystem::rename(job.directory() + "/aside", state);
  ASSERT_EQ(job.Open(), absl::OkStatus());
  EXPECT_EQ(job.job().Describe().phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(job.job().Describe().reason(),
              testing::HasSubstr("--to-durable"));
  job.Close();
  LeaveNote(job);
  ASSERT_EQ(job.Open(), absl::OkStatus());
  job.AttachAll();
  EXPECT_EQ(job.StateBytes(), newest);
}

TEST(JobDurabilityTest, MemoryIsKeptWithoutADurableStep) {
  JobHarness job(SetupOf(v1::PLACEMENT_NVME, DType::kFloat32,
                         v1::DURABILITY_KIND_UNSPECIFIED));
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  const std::string state = job.StateBytes();
  job.Close();
  LeaveNote(job);
  const absl::Status refused = job.Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), testing::HasSubstr("memory is kept"));
  ASSERT_TRUE(job.Open().ok());
  job.AttachAll();
  EXPECT_EQ(job.StateBytes(), state);
}

// The step's commit may have been under way when the former engine died.
TEST(JobDurabilityTest, AnOverdueStepIsMadeDurableByTheNextEngine) {
  JobHarness::Setup setup =
      SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, v1::DURABILITY_KIND_EVERY);
  setup.storage.set_every_steps(3);
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  job.Close();
  const std::string commits = FolderOf(job) + "/commits";
  std::filesystem::copy_file(commits, commits + "-aside");
  ASSERT_TRUE(job.Open().ok());
  job.AttachAll();
  Train(&job, 3, 4);
  job.Close();
  std::filesystem::rename(commits + "-aside", commits);
  ASSERT_TRUE(job.Open().ok());
  // The commit is on its way; the time is only how long a failing test takes.
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (job.job().Describe().disk().durable_step() != 4 && absl::Now() < end) {
    std::this_thread::yield();
  }
  EXPECT_EQ(job.job().Describe().disk().durable_step(), 4u);
}

// A private job would be gone with its last session, five seconds after each
// reboot.
TEST(JobDurabilityTest, APrivateJobHasNone) {
  auto setup =
      SetupOf(v1::PLACEMENT_HOST, DType::kFloat32, v1::DURABILITY_KIND_STEP);
  setup.ephemeral = true;
  JobHarness job(setup);
  const absl::Status status = job.Register(0).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

TEST(JobDurabilityTest, NobodyElseGetsADurableJob) {
  JobHarness job(
      SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, v1::DURABILITY_KIND_STEP));
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  job.Close();
  job.DropMemory();
  std::ofstream(FolderOf(job) + "/owner") << 65534;
  EXPECT_TRUE(absl::IsPermissionDenied(job.Open()));
  std::filesystem::remove(FolderOf(job) + "/owner");
  EXPECT_TRUE(absl::IsFailedPrecondition(job.Open()));
  std::ofstream(FolderOf(job) + "/owner") << "0\n";
  ASSERT_TRUE(job.Open().ok());
  EXPECT_EQ(job.job().Describe().committed_step(), 2u);
}

// A job of the last build has no identity.
TEST(JobDurabilityTest, AJobWithoutIdentityIsAdopted) {
  JobHarness job(
      SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, v1::DURABILITY_KIND_STEP));
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  for (const bool loses_memory : {false, true}) {
    job.Close();
    if (loses_memory) job.DropMemory();
    std::filesystem::remove(FolderOf(job) + "/identity");
    std::filesystem::remove(FolderOf(job) + "/memory");
    ASSERT_TRUE(job.Open().ok());
    EXPECT_EQ(job.job().Describe().committed_step(), 2u);
    EXPECT_TRUE(std::filesystem::exists(FolderOf(job) + "/identity"));
    EXPECT_TRUE(std::filesystem::exists(FolderOf(job) + "/memory"));
  }
}

// The power is lost before its first commit.
TEST(JobDurabilityTest, WhatIsLeftOfAJobThatWasNeverDurableGoes) {
  JobHarness job(
      SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, v1::DURABILITY_KIND_STEP));
  ASSERT_TRUE(job.Register(0).ok());
  EXPECT_TRUE(std::filesystem::exists(FolderOf(job) + "/commits"));
  job.Close();
  job.DropMemory();
  ASSERT_TRUE(job.Open().ok());
  EXPECT_FALSE(std::filesystem::exists(FolderOf(job)));
  EXPECT_TRUE(job.Register(0).ok());
}

// The disk of another job of this name was mounted between the engine's start
// and the registration.
TEST(JobDurabilityTest, ANewJobLeavesTheFilesOfAnotherAlone) {
  JobHarness other(
      SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, v1::DURABILITY_KIND_STEP));
  other.Start(other.RandomTensors(kSeed));
  Train(&other, 1, 1);
  other.Close();
  JobHarness job(
      SetupOf(v1::PLACEMENT_NVME, DType::kFloat32, v1::DURABILITY_KIND_NONE));
  std::filesystem::create_directories(FolderOf(job));
  std::filesystem::copy(FolderOf(other), FolderOf(job));
  const absl::Status status = job.Register(0).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(std::filesystem::exists(FolderOf(job) + "/commits"));
  other.DropMemory();
  ASSERT_TRUE(other.Open().ok());
  EXPECT_EQ(other.job().Describe().committed_step(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Types, JobDurableTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16));

}  // namespace
}  // namespace optstate::session
