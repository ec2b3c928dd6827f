// Loads into a job whose state may be larger than memory: what they bring waits
// on its disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/session/testing/disk_job_fixture.h"
#include "server/session/testing/held_read.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;

class JobLoadOnDiskTest : public DiskJobFixture {
 protected:
  std::string LogOnDisk() const { return job_->disk() + "/jobs/test/load"; }
  std::string LogInMemory() const { return job_->directory() + "/state/load"; }
  // Leaves no memory for anything else.
  void LimitMemoryToWhatThereIs() {
    v1::Limits limits;
    limits.set_job_state_bytes_max(job_->job().Describe().state_bytes());
    job_->job().SetLimits(limits);
  }
};

TEST_F(JobLoadOnDiskTest, ALoadOfTheWholeStateTakesNoMemory) {
  Start();
  LimitMemoryToWhatThereIs();
  const Tensors next = job_->RandomTensors(kSeed + 100);
  job_->LoadMasters(next);
  EXPECT_TRUE(fs::exists(LogOnDisk()));
  EXPECT_FALSE(fs::exists(LogInMemory()));
  ASSERT_TRUE(job_->FinishAll().status.ok());
  EXPECT_FALSE(fs::exists(LogOnDisk()));
  for (uint32_t p = 0; p < next.size(); ++p) {
    EXPECT_EQ(job_->Fetch(v1::STATE_ARRAY_MASTER, p), next[p]);
  }
  Train(job_.get(), 3, 3);
}

TEST_F(JobLoadOnDiskTest, AJobThatLiesInMemoryHasItsLogThere) {
  Start(v1::PLACEMENT_HOST);
  LimitMemoryToWhatThereIs();
  ASSERT_TRUE(job_->job().BeginLoad(0).ok());
  const absl::Status refused =
      job_->LoadMaster(0, 0, job_->RandomTensors(kSeed + 100)[0]);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
}

// That of a killed engine, and that of a build which had it in memory.
TEST_F(JobLoadOnDiskTest, AnUnfinishedLogIsRemoved) {
  Start();
  const std::string state = job_->StateBytes();
  for (const std::string& left : {LogOnDisk(), LogInMemory()}) {
    job_->Close();
    std::ofstream(left) << "left";
    ASSERT_TRUE(job_->Open().ok());
    EXPECT_FALSE(fs::exists(left)) << left;
    job_->AttachAll();
    EXPECT_EQ(job_->StateBytes(), state);
  }
}

// An operator's look waits for no read of a load or a fetch: else these tests
// do not end.
TEST_F(JobLoadOnDiskTest, NoOperatorWaitsForTheReadOfAFetch) {
  for (const v1::StateArray array :
       {v1::STATE_ARRAY_STATE_0, v1::STATE_ARRAY_PARAMETER}) {
    JobHarness::Setup setup =
        DiskJobSetup(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP);
    setup.storage.set_parameters_on_disk(array == v1::STATE_ARRAY_PARAMETER);
    Start(setup);
    HeldRead held;
    std::vector<float> found;
    std::thread reader([&] { found = job_->Fetch(array, 0); });
    held.Await();
    EXPECT_EQ(job_->job().Describe().committed_step(), 2u);
    EXPECT_TRUE(job_->job().ListParameters({}).ok());
    held.Release();
    reader.join();
    EXPECT_EQ(found, job_->Fetch(array, 0));
  }
}

TEST_F(JobLoadOnDiskTest, NoOperatorWaitsForTheReadOfALoad) {
  Start();
  const Tensors next = job_->RandomTensors(kSeed + 100);
  ASSERT_TRUE(job_->job().BeginLoad(0).ok());
  ASSERT_TRUE(job_->LoadArray(0, v1::STATE_ARRAY_STATE_0, 1, next[1]).ok());
  HeldRead held;
  absl::Status loaded;
  std::thread loader([&] { loaded = job_->LoadMaster(0, 0, next[0]); });
  held.Await();
  EXPECT_THAT(job_->job().Describe().open_load(),
              testing::HasSubstr("rank 0 has begun"));
  held.Release();
  loader.join();
  EXPECT_TRUE(loaded.ok()) << loaded;
  ASSERT_TRUE(job_->FinishAll().status.ok());
  EXPECT_EQ(job_->Fetch(v1::STATE_ARRAY_MASTER, 0), next[0]);
  EXPECT_EQ(job_->Fetch(v1::STATE_ARRAY_STATE_0, 1), next[1]);
}

// The first load of a job, in place: its records have been written, and are
// read to be changed again.
TEST_F(JobLoadOnDiskTest, NoOperatorWaitsForTheReadOfALoadInPlace) {
  job_ = std::make_unique<JobHarness>(
      DiskJobSetup(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_NONE));
  job_->AttachAll();
  const Tensors next = job_->RandomTensors(kSeed + 100);
  ASSERT_TRUE(job_->job().BeginLoad(0).ok());
  for (const uint32_t p : {0, 1}) {
    ASSERT_TRUE(job_->LoadMaster(0, p, next[p]).ok());
  }
  HeldRead held;
  absl::Status loaded;
  std::thread loader([&] { loaded = job_->LoadMaster(0, 0, next[0]); });
  held.Await();
  EXPECT_EQ(job_->job().Describe().phase(), v1::JOB_PHASE_LOADING);
  held.Release();
  loader.join();
  EXPECT_TRUE(loaded.ok()) << loaded;
  ASSERT_TRUE(job_->FinishAll().status.ok());
  EXPECT_EQ(job_->Fetch(v1::STATE_ARRAY_MASTER, 0), next[0]);
}

}  // namespace
}  // namespace optstate::session
